"""Fixtures of the scheduler layer: rigs that are closed, and vLLM's global put back, after each test."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


@pytest.fixture
def layout() -> tuple[str, ...]:
    """Groups of the engines that do not say theirs; `rigs.on_layouts` gives a test several of these."""
    return ("full",)


@pytest.fixture
def make_rig(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: tuple[str, ...], request: pytest.FixtureRequest
) -> Iterator[Callable[..., Any]]:
    """Build engines, in an epoch if one is given; each is closed at the end, and `check_clean` if the test is not marked as `unclean`.

    GPU blocks are given for one group, and every further group gets as many.
    """
    from vllm.v1.core import kv_cache_utils

    from tests.support.scheduler import Rig
    from tests.support.scheduler_config import EngineOptions

    # On a machine that stands still, the next look at the weights need not wait for its share of the time, and no answer or plan expires.
    monkeypatch.setattr("epochkv_connector.weights.watch.SHARE", 1)
    monkeypatch.setattr("epochkv_connector.tiers.lookup.READ_LEASE_SECONDS", 1e6)
    monkeypatch.setattr("epochkv_connector.tiers.hits.PLAN_TTL_SECONDS", 1e6)
    had = hasattr(kv_cache_utils, "NONE_HASH")
    before = getattr(kv_cache_utils, "NONE_HASH", None)
    made: list[Any] = []

    def build(kind: type[Rig] = Rig, *, epoch: int | None = None, **kwargs: Any) -> Any:
        if "groups" not in kwargs:
            kwargs["groups"] = layout
            kwargs["num_blocks"] = kwargs.get("num_blocks", EngineOptions.num_blocks) * len(layout)
        rig = kind(tmp_path / f"rig{len(made)}", monkeypatch=monkeypatch, **kwargs)
        made.append(rig)
        if epoch is not None:
            rig.adopt(epoch)
        return rig

    with ExitStack() as ending:
        yield build
        if had:
            ending.callback(setattr, kv_cache_utils, "NONE_HASH", before)
        for rig in made:
            ending.callback(rig.close)
        for rig in made if request.node.get_closest_marker("unclean") is None else ():
            rig.check_clean()


@pytest.fixture
def rig(make_rig: Callable[..., Any]) -> Any:
    return make_rig(epoch=0)


@pytest.fixture
def store() -> Any:
    from tests.support.scheduler import SharedStore

    return SharedStore()
