"""Bypass, lease, the overwritten global, local resets, siblings, adapters: when the root is whose, with the real Scheduler."""

import logging
from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash

from epochkv_connector.engine import blocks
from epochkv_connector.engine.interface import UnsupportedEngine
from tests.scheduler.rigs import LENGTH, TOKENS, FailsOnce, MakeRig, begin_load, every_layout, filled, found, release
from tests.support.scheduler import BLOCK, SharedStore, global_root, prompt, write_credentials


# ---------------------------------------------------------------------------------------------- construction
def test_nothing_is_adopted_before_vllm_has_set_its_own_global(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    ports: list[blocks.GlobalRoot] = []
    ready: list[bool] = []

    class Recorded(blocks.GlobalRoot):
        def __init__(self) -> None:
            super().__init__()
            ports.append(self)

    def observed(function: Any) -> None:
        ready.extend(port.ready() for port in ports)
        init_none_hash(function)
        ready.extend(port.ready() for port in ports)

    monkeypatch.setattr(blocks, "GlobalRoot", Recorded)
    monkeypatch.setattr("tests.support.scheduler.init_none_hash", observed)
    make_rig()
    assert ready == [False, True]


# ---------------------------------------------------------------------------------------------- bypass
def test_unassigned_with_pushed_weights_reuses_nothing(make_rig: MakeRig, store: SharedStore) -> None:
    rig = make_rig(store=store)
    first, second = rig.serve(TOKENS), rig.serve(TOKENS)
    assert (rig.cached[first], rig.cached[second]) == (0, 0)
    assert rig.outputs[first] == rig.outputs[second]
    assert store.objects == {}
    assert store.asked == []
    assert rig.tiers.stats()["slots_indexed"] == 0


@pytest.mark.parametrize("broken", ["secret", "key", "absent"])
def test_a_broken_hub_configuration_is_said_once(make_rig: MakeRig, tmp_path: Path, caplog: pytest.LogCaptureFixture, broken: str) -> None:
    credentials = write_credentials(tmp_path / "broken")
    if broken == "secret":
        (credentials / "root.secret").write_text("not hex")
    elif broken == "key":
        (credentials / "client.key").write_text("short")
    else:
        credentials = tmp_path / "nowhere"
    with caplog.at_level(logging.WARNING, logger="vllm.epochkv"):
        logging.getLogger("vllm").propagate = True
        rig = make_rig(hub=False, extra={"hub": {"endpoint": "tcp://127.0.0.1:9", "credentials_dir": str(credentials)}})
    said = [record for record in caplog.records if "without the pool's caches" in record.getMessage()]
    assert len({id(record) for record in said}) == 1  # vLLM 0.30 sets its logger up so that pytest hears a record twice
    rig.serve(TOKENS)
    assert found(rig) == 0
    assert rig.connector.scheduler.gauges()["hub_unusable"] == 1.0


# ---------------------------------------------------------------------------------------------- lease
@every_layout
def test_a_lost_lease_is_bypass_and_its_return_finds_the_old_names_again(rig: Any) -> None:
    rig.serve(TOKENS)
    waiting = rig.add(TOKENS)
    rig.lease_until = 0.0
    rig.run()
    assert rig.cached[waiting.request_id] == 0  # pinned to the shared root before, and asked after the loss
    assert found(rig) == 0
    rig.lease_until = float("inf")
    after = rig.serve(TOKENS)
    assert rig.cached[after] == 8 * BLOCK


@pytest.mark.unclean
@every_layout
@pytest.mark.parametrize("event", ["lease", "reset", "adoption-that-fails"])
def test_a_lease_lost_while_a_load_runs_fails_the_load(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, event: str) -> None:
    """And so do a local reset, and an adoption though an error of ours keeps its bookkeeping from being done."""
    rig, tokens = filled(make_rig)
    request = begin_load(rig, tokens)
    if adopts := event.startswith("adoption"):
        FailsOnce(rig.tiers, "adopt", monkeypatch)
        rig.adopt(1, weights="w1")
    elif event == "reset":
        rig.scheduler.reset_connector_cache()
        rig.weights = "w1"
    else:
        rig.lease_until = 0.0
    release(rig)
    rig.run()
    assert rig.workers[0].invalidated == [request.request_id]
    assert rig.cached[request.request_id] == 0
    assert not any(rig.stale_tokens.values())
    assert rig.connector._guard.errors == ({"adopt": 1} if adopts else {})


def test_running_requests_are_current_again_when_the_lease_returns(make_rig: MakeRig, store: SharedStore) -> None:
    rig = make_rig(store=store, epoch=0)
    running = rig.add(prompt(1, LENGTH), max_tokens=2 * BLOCK)
    rig.step()
    rig.lease_until = 0.0
    rig.step()
    assert rig.pins.old_epoch_requests() == 1
    rig.lease_until = float("inf")
    rig.step()
    assert rig.pins.old_epoch_requests() == 0
    rig.run()
    assert running.request_id in rig.finished
    assert len(store.objects) == (LENGTH + 2 * BLOCK - 1) // BLOCK  # blocks completed after the return were saved too


# ---------------------------------------------------------------------------------------------- the overwritten global
def test_an_overwritten_global_is_bypass_for_this_instance(make_rig: MakeRig, store: SharedStore) -> None:
    rig = make_rig(store=store, epoch=0)
    rig.serve(TOKENS)
    saved = dict(store.objects)
    init_none_hash(sha256)  # a second engine core in this process
    foreign = global_root()
    assert found(rig) == 0
    rig.adopt(1, weights="w1")
    assert found(rig) == 0
    assert store.objects == saved
    assert global_root() is foreign  # it is not fought over
    assert rig.pins.counters["root_overwritten"] == 1
    assert rig.connector.scheduler.gauges()["root_overwritten"] == 1.0
    assert rig.connector.scheduler.hooks.weights() == (None, "somebody else has overwritten vLLM's block-hash root: restart the engine")


# ---------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize("kind", [MultiConnector, type("PdConnector", (MultiConnector,), {})])
def test_a_multiconnector_with_an_untested_sibling_is_refused(make_rig: MakeRig, kind: type[MultiConnector]) -> None:
    """Also where no command has checked the configuration before."""
    rig = make_rig()
    ours = rig.vllm_config.kv_transfer_config
    names = ("kv_connector", "kv_connector_module_path", "kv_role", "kv_connector_extra_config")
    children = [{name: getattr(ours, name) for name in names}, {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}]
    rig.vllm_config.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config={"connectors": children}
    )
    with pytest.raises(UnsupportedEngine, match="OffloadingConnector"):
        kind(rig.vllm_config, KVConnectorRole.SCHEDULER, rig.kv_cache_config)
    rig.vllm_config.kv_transfer_config = ours
