"""SkyRL's own code makes vLLM's arguments of what its page shows; vLLM takes them, and our check sees our configuration."""

import sys
import typing
from pathlib import Path
from typing import Any

import pytest
import typing_extensions
from vllm.engine.arg_utils import AsyncEngineArgs

from epochkv_connector.engine import limits
from epochkv_fence.launch import NAME


def skyrl(model: Path, transfer: dict[str, Any]) -> Any:
    """The configuration that vLLM makes of what SkyRL makes of a model and a `kv_transfer_config`."""
    with pytest.MonkeyPatch.context() as patch:
        put_skyrl_right(patch)
        from skyrl.backends.skyrl_train.inference_servers.utils import build_vllm_cli_args
        from skyrl.train.config import SkyRLTrainConfig

        engine = {"model_dtype": "float32", "engine_init_kwargs": {"kv_transfer_config": transfer}}
        trainer = {"policy": {"model": {"path": str(model)}}, "placement": {"colocate_all": False}}
        config = SkyRLTrainConfig.from_cli_overrides({"trainer": trainer, "generator": {"inference_engine": engine}})
        arguments = build_vllm_cli_args(config)
    assert arguments.worker_extension_cls.endswith("NewInferenceWorkerWrap")
    return AsyncEngineArgs.from_cli_args(arguments).create_engine_config()


def put_skyrl_right(patch: pytest.MonkeyPatch) -> None:
    """What keeps SkyRL 0.3.0 from running here: a module that vLLM has moved, and on Python 3.11 a base class that pydantic refuses."""
    import vllm.entrypoints.launchers.cli_args as moved

    patch.setitem(sys.modules, "vllm.entrypoints.openai.cli_args", moved)
    if sys.version_info < (3, 12):
        patch.setattr(typing, "TypedDict", typing_extensions.TypedDict)


def test_an_engine_would_join_the_pool(weights: tuple[Path, Path], transfer: dict[str, Any]) -> None:
    config = skyrl(weights[0], transfer)
    assert config.kv_transfer_config.kv_connector == NAME
    assert config.kv_transfer_config.kv_connector_extra_config == transfer["kv_connector_extra_config"]
    limits.check_before_load(config)


def test_skyrl_still_needs_to_be_put_right() -> None:
    """Its page says so. When this fails, try a real run."""
    with pytest.raises(ImportError, match=r"openai\.cli_args"):
        import vllm.entrypoints.openai.cli_args  # noqa: F401
