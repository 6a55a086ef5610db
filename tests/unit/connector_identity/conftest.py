"""What vLLM makes of the arguments of an engine, once for all tests of starts."""

from typing import Any

import pytest

from tests.support.scheduler import write_model_dir


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of an engine without a connector; tests change copies."""
    from vllm import EngineArgs

    model = write_model_dir(tmp_path_factory.mktemp("model"))
    return EngineArgs(model=str(model), skip_tokenizer_init=True, enforce_eager=True).create_engine_config()
