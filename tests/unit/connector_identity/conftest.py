"""What vLLM makes of the arguments of an engine, once for all tests of starts."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.scheduler_config import write_model_dir


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of an engine without a connector; tests change copies."""
    from vllm import EngineArgs

    model = write_model_dir(tmp_path_factory.mktemp("model"))
    return EngineArgs(model=str(model), skip_tokenizer_init=True, enforce_eager=True).create_engine_config()


@pytest.fixture
def configured(base: Any) -> Callable[..., Any]:
    """A copy with this `kv_transfer_config`, and other values of fields of its parallel configuration."""
    from vllm.config import KVTransferConfig

    def make(transfer: dict[str, Any] | None, **parallel: Any) -> Any:
        config = copy.copy(base)
        config.kv_transfer_config = None if transfer is None else KVTransferConfig(**{"kv_role": "kv_both", **transfer})
        config.parallel_config = copy.copy(base.parallel_config)
        for name, value in parallel.items():
            setattr(config.parallel_config, name, value)
        return config

    return make
