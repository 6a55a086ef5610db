"""A worker extension (`--worker-extension-cls`): ways to write weights that frameworks have and vLLM's own API has not.

The methods are RPC names that nobody has listed; `write_later` does its work on a thread, past every call.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.v1.kv_cache_interface import MambaSpec

_get_spec = MambaMixer2.get_kv_cache_spec


def _get_spec_without_checkpoints(self: Any, vllm_config: Any) -> Any:
    """vLLM's scan for CPUs returns no state from inside a prefill, but Mamba-2 layers promise them: let them promise none."""
    spec = _get_spec(self, vllm_config)
    if not isinstance(spec, MambaSpec):
        return spec
    return dataclasses.replace(spec, num_prefill_checkpoint_blocks=0, prefill_checkpoint_alignment=None)


MambaMixer2.get_kv_cache_spec = _get_spec_without_checkpoints  # type: ignore[method-assign]


class Writer:
    """Mixed into vLLM's worker."""

    rank: int
    model_runner: Any

    def _parameter(self, name: str) -> torch.nn.Parameter:
        return dict(self.model_runner.get_model().named_parameters())[name]

    def scale_in_place(self, name: str, factor: float) -> None:
        """As delta pushes do: straight into a parameter."""
        with torch.no_grad():
            self._parameter(name).mul_(factor)

    def half_a_push(self, path: str) -> None:
        """The embedding of other weights, then the trainer is gone."""
        from safetensors.torch import load_file

        tensors = load_file(next(Path(path).glob("*.safetensors")))
        with torch.no_grad():
            self._parameter("model.embed_tokens.weight").copy_(tensors["model.embed_tokens.weight"])
        raise RuntimeError("the push broke off")

    def slow_while(self, path: str, seconds: float) -> None:
        """From now on every step takes so much longer while that file exists."""

        def wait(*_: object) -> None:
            if Path(path).exists():
                time.sleep(seconds)

        self.model_runner.get_model().register_forward_pre_hook(wait)

    def write_later(self, folder: str, rank: int | None = None) -> None:
        """From now on a file `NAME` in `folder` with a factor in it scales that parameter, once."""
        if rank in (None, self.rank):
            threading.Thread(target=self._listen, args=(Path(folder),), daemon=True).start()

    def _listen(self, folder: Path) -> None:
        while True:
            for order in folder.glob("*.order"):
                factor = float(order.read_text() or "0")
                with torch.no_grad():
                    self._parameter(order.name.removesuffix(".order")).mul_(factor)
                order.rename(order.with_suffix(".done"))
            time.sleep(0.001)
