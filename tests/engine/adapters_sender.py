"""A worker extension (`--worker-extension-cls`): adapters that trainers send in memory, as verl does, with no file and no `add_lora`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Sender:
    """Mixed into vLLM's worker."""

    model_runner: Any

    def take_adapter(self, number: int, folder: str) -> bool:
        """Put the tensors that are in `folder` now in the place of adapter `number`. vLLM reads nothing."""
        from safetensors.torch import load_file
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        place = Path(folder)
        manager = self.model_runner.lora_manager._adapter_manager
        helper = PEFTHelper.from_dict(json.loads((place / "adapter_config.json").read_text()))
        made = LoRAModel.from_lora_tensors(number, load_file(place / "adapter_model.safetensors"), helper, device="cpu")
        manager.remove_adapter(number)
        return bool(manager.add_adapter(made)) and bool(manager.activate_adapter(number))
