"""`kv_role`: who only saves never loads, and who only loads saves nothing; with vLLM's own scheduler."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm.v1.core import kv_cache_utils

from tests.support.scheduler import BLOCK, Rig, SharedStore

TOKENS = list(range(2, 2 + 4 * BLOCK + 3))


@pytest.fixture(autouse=True)
def vllm_root() -> Iterator[None]:
    """Puts the global back that every block hash of vLLM begins with."""
    logging.getLogger("vllm").propagate = True  # our lines go to its handlers from now on: pytest would hear them twice
    before = getattr(kv_cache_utils, "NONE_HASH", None)
    yield
    kv_cache_utils.NONE_HASH = before


def test_a_producer_saves_and_never_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(tmp_path, transfer={"kv_role": "kv_producer"}, monkeypatch=monkeypatch)
    rig.adopt(0)
    rig.serve(TOKENS)
    assert rig.tiers.stats()["slots_indexed"] == 4  # there to be loaded
    assert rig.block_pool.reset_prefix_cache()
    assert rig.cached[rig.serve(TOKENS)] == 0
    rig.check_clean()
    rig.close()


def test_a_consumer_loads_what_others_saved_and_saves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SharedStore()
    for role, found in (("kv_both", 0), ("kv_consumer", 4 * BLOCK)):
        rig = Rig(tmp_path / role, transfer={"kv_role": role}, store=store, monkeypatch=monkeypatch)
        rig.adopt(0)
        assert rig.cached[rig.serve(TOKENS)] == found
        rig.serve([token + 1 for token in TOKENS])  # computed by both
        assert rig.tiers.stats()["saves_emitted"] == (2 if role == "kv_both" else 0)
        assert len(store.objects) == 8
        rig.check_clean()
        rig.close()
