"""What real engines tell: KV events over vLLM's publisher, and metrics of vLLM and of the connector on `/metrics`."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from vllm.distributed.kv_events import KVEventBatch

from hack.observe.catalog import VLLM
from hack.standalone.engine import Engine
from hack.waiting import eventually
from tests.engine.conftest import BLOCKS, CACHED, Pair, Prompts, Reference, check

PAGE = Path(__file__).parents[2] / "docs/reference/metrics.md"


class Router:
    """A subscriber: the blocks that it believes to be where."""

    def __init__(self, endpoint: str) -> None:
        self.where: dict[str, set[int]] = {"GPU": set(), "CPU": set()}
        self.clearings = 0
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(endpoint)
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)

    def listen(self) -> None:
        """Take what has arrived."""
        while self._socket.poll(0):
            for event in self._decoder.decode(self._socket.recv_multipart()[-1]).events:
                self._believe(event)

    def _believe(self, event: Any) -> None:
        kind = type(event).__name__
        if kind == "AllBlocksCleared":
            self.clearings += 1
            for names in self.where.values():
                names.clear()
        elif kind == "BlockStored":
            self.where[event.medium].update(event.block_hashes)
        else:
            self.where[event.medium].difference_update(event.block_hashes)

    def hears(self, medium: str, count: int, what: str) -> None:
        """Poll until so many blocks are believed to be there."""

        def heard() -> bool:
            self.listen()
            return len(self.where[medium]) == count

        eventually(heard, f"{what}: {len(self.where[medium])} blocks in {medium}, not {count}")


@pytest.fixture
def router(pair: Pair, prompts: Prompts) -> Iterator[Router]:
    """Hears A, and believes nothing of what was before."""
    router = Router(pair.events_of(pair.a.name))
    deadline = time.monotonic() + 30.0
    while not router.clearings:  # a subscription takes effect late
        assert time.monotonic() < deadline, "no event arrives"
        pair.pool.bump()
        pair.a.complete(prompts(8), 2)
        router.listen()
    eventually(lambda: pair.a.metric("vllm:epochkv_bypass") == 0 or pair.a.complete(prompts(8), 2) is None, "A uses the epoch")
    pair.a.complete(prompts(8), 2)
    router.listen()
    yield router
    router._socket.close(0)


def test_a_router_hears_of_l1_and_of_every_clearing(pair: Pair, prompts: Prompts, reference: Reference, router: Router) -> None:
    prompt = prompts()
    assert pair.save_through_a(prompt) == reference(prompt, pair.model)
    router.hears("CPU", BLOCKS, "a prompt was saved")
    assert router.where["CPU"] <= router.where["GPU"]
    clearings = router.clearings
    pair.pool.bump()
    pair.a.complete(prompts(8), 2)
    router.hears("CPU", 0, "an epoch change clears")
    assert router.clearings == clearings + 1
    pair.save_through_a(prompts())
    router.hears("CPU", BLOCKS, "the new epoch is saved")


def metrics_page(engine: Engine) -> str:
    """`/metrics`, with the connector's numbers none older than this call."""
    engine.report_metrics([5, 6, 7])
    return engine.request("GET", "/metrics").decode()


def test_hits_are_told_by_tier(pair: Pair, prompts: Prompts, reference: Reference) -> None:
    prompt = prompts()
    pair.save_through_a(prompt)
    for engine, tier, source in ((pair.b, "L2", "external_unspecified"), (pair.a, "L1", "host")):
        assert engine.reset_prefix_cache(external=False)
        metrics_page(engine)  # what it found for earlier tests is counted by now
        before = [
            engine.metric("vllm:prompt_tokens_cached_by_source_total", source=source),
            engine.metric("vllm:epochkv_hit_tokens_total", tier=tier),
            engine.metric("vllm:epochkv_load_bytes_total", tier=tier),
        ]
        answer = engine.complete(prompt)
        check(answer, CACHED, reference(prompt, pair.model))
        metrics_page(engine)
        assert engine.metric("vllm:prompt_tokens_cached_by_source_total", source=source) - before[0] == CACHED
        assert engine.metric("vllm:epochkv_hit_tokens_total", tier=tier) - before[1] == CACHED
        assert engine.metric("vllm:epochkv_load_bytes_total", tier=tier) > before[2]


def test_the_page_of_an_engine_is_that_of_the_documentation(pair: Pair, prompts: Prompts) -> None:
    pair.save_through_a(prompts())
    text = metrics_page(pair.a)
    served = set(re.findall(r"^# TYPE (vllm:epochkv_\w+) (?:counter|gauge)$", text, re.MULTILINE))
    served = {name for name in served if not name.endswith("_created")}
    documented = set(re.findall(r"^\| `(vllm:epochkv_\w+)`", PAGE.read_text(), re.MULTILINE))
    assert served == documented
    with_values = set(re.findall(r"^(vllm:epochkv_\w+)[{ ]", text, re.MULTILINE))
    assert documented <= with_values, "a gauge is never reported"
    assert pair.a.metric("vllm:epochkv_broken") == 0
    assert 0 < pair.a.metric("vllm:epochkv_lease_remaining_seconds") <= 6.0
    assert pair.a.metric("vllm:epochkv_epoch") == pair.pool.snapshot().published
    assert pair.a.metric("vllm:epochkv_store_state", rank="0") == pair.a.metric("vllm:epochkv_store_state", rank="scheduler") == 2
    assert pair.a.metric("vllm:epochkv_errors_total") == 0
    assert "has no series" not in pair.a.process.log.read_text()


def test_what_boards_and_alerts_ask_of_vllm_is_served(pair: Pair, prompts: Prompts) -> None:
    """By the names and labels that this vLLM has."""
    pair.a.complete(prompts(8), 2)
    text = metrics_page(pair.a)
    for metric in VLLM:
        for series in metric.series:
            found = re.search(rf"^{series}{{(.*)}} ", text, re.MULTILINE)
            assert found is not None, f"vLLM does not serve {series}"
            assert set(metric.labels) == set(re.findall(r'(\w+)="', found[1])) - {"le"}, series
