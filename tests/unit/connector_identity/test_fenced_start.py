"""`EPOCHKV_FENCE`: which engines can have the fence without our connector, and the one sentence that others get."""

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.platforms import current_platform

from epochkv_connector.engine import fenced, plugin
from epochkv_connector.engine.interface import UnsupportedEngine
from epochkv_connector.engine.limits import MULTI
from epochkv_fence.connection import ConfigurationError

CONNECTION = {"pool": {"name": "p", "uid": "u"}, "local": {"capacity_bytes": 1 << 30}}

Start = Callable[..., Any]
pytestmark = pytest.mark.skipif(current_platform.is_unspecified(), reason="this vLLM was built for other machines: it configures no engine")


@pytest.fixture
def start(base: Any, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Check an engine with this connector, as vLLM's plugin does."""
    monkeypatch.setenv("EPOCHKV_FENCE", "1")
    monkeypatch.setenv("EPOCHKV_CONFIG", json.dumps(CONNECTION))

    def check(name: str | None = None, extra: dict[str, Any] | None = None, module: str | None = None, **parallel: Any) -> Any:
        config = copy.copy(base)
        given = {"kv_connector": name, "kv_role": "kv_both", "kv_connector_module_path": module}
        config.kv_transfer_config = None if name is None else KVTransferConfig(**given, kv_connector_extra_config=extra or {})
        config.parallel_config = copy.copy(base.parallel_config)
        for key, value in parallel.items():
            setattr(config.parallel_config, key, value)
        plugin.check(config)
        return fenced.check(config)

    return check


def children(*names: str) -> dict[str, Any]:
    return {"connectors": [{"kv_connector": name, "kv_role": "kv_both"} for name in names]}


@pytest.mark.parametrize("name", [None, *sorted(fenced.KNOWN)])
def test_connectors_whose_names_are_ours_are_fenced_without_tiers(start: Start, name: str | None) -> None:
    config = start(name)
    assert config.pool.uid == "u"
    assert (config.local, config.distributed) == (None, None)


def test_a_multiconnector_of_such_is_fenced(start: Start) -> None:
    assert start("MultiConnector", children("NixlConnector", "OffloadingConnector")) is not None


@pytest.mark.parametrize("name", [*fenced.KNOWN, MULTI])
def test_every_fenced_connector_is_one_of_vllm(name: str) -> None:
    assert name in KVConnectorFactory._registry


@pytest.mark.parametrize(("name", "module"), [("ExampleConnector", None), ("Mine", "mine"), ("NixlConnector", "mine")])
def test_a_connector_whose_keys_are_not_known_is_refused(start: Start, name: str, module: str | None) -> None:
    sentence = f"EPOCHKV_FENCE is set and the engine has {name}: .*its keys may be made of tokens alone.*unset EPOCHKV_FENCE"
    with pytest.raises(UnsupportedEngine, match=sentence) as caught:
        start(name, module=module)
    assert "\n" not in str(caught.value)
    assert ("remove kv_connector_module_path for vLLM's own NixlConnector" in str(caught.value)) == (name == "NixlConnector")


def test_a_multiconnector_is_refused_for_what_it_holds(start: Start) -> None:
    inner = children("ExampleConnector")
    nested = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": inner}
    for held in (*inner["connectors"], nested):
        with pytest.raises(UnsupportedEngine, match="the engine has ExampleConnector"):
            start("MultiConnector", {"connectors": [*children("NixlConnector")["connectors"], held]})


@pytest.mark.parametrize("extra", [None, children("NixlConnector", "EpochKVConnector")])
def test_our_own_connector_brings_the_fence_itself(start: Start, extra: dict[str, Any] | None) -> None:
    ours = {"pool": CONNECTION["pool"]}
    assert start("EpochKVConnector" if extra is None else "MultiConnector", extra or ours) is None


@pytest.mark.parametrize("value", [None, " "])
def test_the_pool_has_to_be_named(start: Start, monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.delenv("EPOCHKV_CONFIG") if value is None else monkeypatch.setenv("EPOCHKV_CONFIG", value)
    with pytest.raises(ConfigurationError, match=r"EPOCHKV_FENCE is set and EPOCHKV_CONFIG is not; set it to the pool's connection\.json"):
        start()


def test_ranks_that_schedule_for_themselves_are_refused(start: Start) -> None:
    with pytest.raises(UnsupportedEngine, match=r"external_launcher with 2 ranks"):
        start(distributed_executor_backend="external_launcher", world_size=2)
    assert start(distributed_executor_backend="external_launcher", world_size=1) is not None


def test_only_one_and_zero_are_answers(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPOCHKV_FENCE", "yes")
    with pytest.raises(ConfigurationError, match=r"EPOCHKV_FENCE is 'yes'; it must be 1 .* or 0"):
        start()


@pytest.mark.parametrize("value", [None, "", "0"])
def test_without_the_variable_everything_is_left_to_vllm(start: Start, monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.delenv("EPOCHKV_FENCE") if value is None else monkeypatch.setenv("EPOCHKV_FENCE", value)
    assert start("HF3FSKVConnector") is None


def test_another_scheduler_is_refused(start: Start, base: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        """Not derived from vLLM's."""

    monkeypatch.setattr(base.scheduler_config, "scheduler_cls", Other)
    with pytest.raises(UnsupportedEngine, match=r"scheduler_cls is .*Other.*, which is not derived from vLLM's Scheduler"):
        start()
