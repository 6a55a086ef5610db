"""`kv_role`: who only saves never loads, and who only loads says so; with vLLM's own scheduler."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm.v1.core import kv_cache_utils

from tests.support.scheduler import BLOCK, Rig, SharedStore

TOKENS = list(range(2, 2 + 4 * BLOCK + 3))


@pytest.fixture
def vllm_root() -> Iterator[None]:
    """Puts the global back that every block hash of vLLM begins with."""
    before = getattr(kv_cache_utils, "NONE_HASH", None)
    yield
    kv_cache_utils.NONE_HASH = before


def serve_again(rig: Rig) -> int:
    """Tokens found in L1 by a second request, after the GPU's own cache is gone."""
    rig.adopt(0)
    rig.serve(TOKENS)
    assert rig.tiers.stats()["slots_indexed"] == 4  # there to be loaded
    assert rig.block_pool.reset_prefix_cache()
    found = rig.cached[rig.serve(TOKENS)]
    rig.check_clean()
    return found


@pytest.mark.usefixtures("vllm_root")
@pytest.mark.parametrize(("role", "found"), [("kv_both", 4 * BLOCK), ("kv_producer", 0)])
def test_a_producer_saves_and_never_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, role: str, found: int
) -> None:
    with caplog.at_level(logging.WARNING, logger="vllm.epochkv"):
        logging.getLogger("vllm").propagate = True
        rig = Rig(tmp_path / "rig", transfer={"kv_role": role}, monkeypatch=monkeypatch)
    try:
        assert serve_again(rig) == found
    finally:
        rig.close()
    said = {record.getMessage() for record in caplog.records if "loads are off" in record.getMessage()}
    reason = "EpochKV: loads are off: kv_role is 'kv_producer', which saves only; set it to 'kv_both' to load as well"
    assert said == ({reason} if role == "kv_producer" else set())


@pytest.mark.usefixtures("vllm_root")
def test_a_consumer_loads_what_others_saved_and_saves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = SharedStore()
    rigs = []
    with caplog.at_level(logging.WARNING, logger="vllm.epochkv"):
        logging.getLogger("vllm").propagate = True
        for role in ("kv_both", "kv_consumer"):
            rigs.append(Rig(tmp_path / role, transfer={"kv_role": role}, store=store, monkeypatch=monkeypatch))
            rigs[-1].adopt(0)
            found = rigs[-1].cached[rigs[-1].serve(TOKENS)]
            assert found == (4 * BLOCK if role == "kv_consumer" else 0)
            rigs[-1].serve([token + 1 for token in TOKENS])  # computed by both
    writer, consumer = rigs
    assert len(store.objects) == 8
    assert (writer.tiers.stats()["saves_emitted"], consumer.tiers.stats()["saves_emitted"]) == (2, 0)
    for rig in rigs:
        rig.check_clean()
        rig.close()
    reason = "kv_role is 'kv_consumer', which loads only; set it to 'kv_both' to save as well"
    assert {record.getMessage() for record in caplog.records if "are off" in record.getMessage()} == {f"EpochKV: saves are off: {reason}"}
