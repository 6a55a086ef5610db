"""Our fence under vLLM's own connectors: whatever they keep, a request that comes after a change finds nothing from before it.
Schedulers and scheduler halves are real; what a worker keeps is *contents*, so that the oracle sees whose KV a request finds."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from vllm.config import KVTransferConfig, VllmConfig
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput

from epochkv_connector.engine import patches
from epochkv_connector.engine.fenced import fence
from tests.scheduler.rigs import LENGTH, TOKENS, WHOLE, FailsOnce, MakeRig, Patch, found, push_out
from tests.scheduler.test_transfers import produce, read_blocks
from tests.support.scheduler import BLOCK, OwnRoot, RequestStatus, Rig
from tests.support.scheduler_config import write_credentials
from tests.support.scheduler_worker import Content

POOL = "6f1c2d3e-0000-4000-8000-000000000001"
Given = dict[str, Any] | None


class Stock:
    """The worker half of one of vLLM's connectors. This one is none.

    Attributes:
        transfer: what `kv_transfer_config` says of it; None: there is no connector.
        hold_loads: loads end when this is taken back.
        hold_lookups: where the store is asked, its answer is not there yet.
    """

    transfer: ClassVar[Given] = None

    def __init__(self) -> None:
        self.hold_loads = self.hold_lookups = False
        self.host: dict[int, Content] = {}
        self.loads: list[Any] = []

    def ending(self) -> list[Any]:
        """Loads that end with this step."""
        ends, self.loads = (self.loads, []) if not self.hold_loads else ([], self.loads)
        return ends

    def before(self, monkeypatch: Patch) -> None:
        """Before the scheduler half is made."""

    def work(self, rig: FencedRig, metadata: Any) -> KVConnectorOutput | None:
        """A step's orders, behind its forward pass."""
        return None


class FencedRig(Rig):
    """One engine that has the fence without our connector; if not `fenced`, it is as vLLM made it."""

    def __init__(
        self,
        tmp: Path,
        *,
        monkeypatch: Patch,
        stock: Stock,
        fenced: bool = True,
        change_config: Callable[[VllmConfig], object] = lambda config: None,
        **options: Any,
    ) -> None:
        self.stock = stock
        hub = {"endpoint": "tcp://127.0.0.1:9", "credentials_dir": str(write_credentials(tmp / "fence"))}
        monkeypatch.setenv("EPOCHKV_CONFIG", json.dumps({"pool": {"name": "policy", "uid": POOL}, "hub": hub}))
        monkeypatch.setenv("EPOCHKV_FENCE", "1" if fenced else "0")
        monkeypatch.setattr(Scheduler, "__init__", getattr(Scheduler.__init__, "__wrapped__", Scheduler.__init__))
        patches.after_scheduler(fence)
        stock.before(monkeypatch)

        def stock_alone(config: Any) -> None:
            config.kv_transfer_config = None if stock.transfer is None else KVTransferConfig(kv_role="kv_both", **stock.transfer)
            change_config(config)

        super().__init__(tmp, monkeypatch=monkeypatch, change_config=stock_alone, **options)
        if fenced:
            root: Any = self.pins.root
            root._global = OwnRoot(root.snapshot.root)  # several engines share this process, and vLLM's global

    def update(self, output: Any) -> None:
        runner = self._forward(output)
        runner.kv_connector_output = self.stock.work(self, output.kv_connector_metadata)
        self.take(output, runner)

    def release(self) -> None:
        self.stock.hold_loads = False

    def close(self) -> None:
        self.scheduler.shutdown()


class MooncakeStore(Stock):
    """vLLM's MooncakeStoreConnector; look-ups come before vLLM looks, or with a step between. Engines share a store's `objects`."""

    transfer: ClassVar[Given] = {"kv_connector": "MooncakeStoreConnector", "kv_connector_extra_config": {"lookup_async": True}}

    def __init__(self, objects: dict[str, Content]) -> None:
        super().__init__()
        self.objects = objects
        self.wiped = 0
        self.open: dict[str, list[bytes]] = {}

    def before(self, monkeypatch: Patch) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import scheduler

        monkeypatch.setattr(scheduler, "LookupKeyClient", lambda _config: self)

    def lookup(self, request_id: str, num_tokens: int, block_hashes: list[bytes], non_block: bool = False) -> Any:
        """As vLLM's client: asked once, and answered by what was asked then."""
        from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.protocol import MooncakeLookupResult

        asked = self.open.setdefault(request_id, list(block_hashes))
        if self.hold_lookups:
            return None
        del self.open[request_id]
        hit = next((index for index, name in enumerate(asked) if name.hex() not in self.objects), len(asked))
        return MooncakeLookupResult(min(hit, (num_tokens - 1) // BLOCK) * BLOCK)

    def discard(self, request_id: str) -> None:
        self.open.pop(request_id, None)

    def reset(self) -> bool:
        self.wiped += 1
        self.objects.clear()
        return True

    def work(self, rig: FencedRig, metadata: Any) -> KVConnectorOutput:
        from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import MooncakeStoreWorkerMetadata

        saved = {}
        for one in metadata.requests if metadata is not None else ():
            if one.load_spec is not None and one.load_spec.can_load:
                self.loads.append(one)
            if one.can_save:
                self._save(rig, one)
                saved[one.store_job_id] = 1
        finished = {self._load(rig, one) for one in self.ending()}
        return KVConnectorOutput(finished_recving=finished, kv_connector_worker_meta=MooncakeStoreWorkerMetadata(completed_saves=saved))

    def _save(self, rig: FencedRig, one: Any) -> None:
        for index in range(one.token_len_chunk // BLOCK):
            self.objects.setdefault(one.block_hashes[index].hex(), rig.gpu[one.block_ids[0][index]])

    def _load(self, rig: FencedRig, one: Any) -> str:
        spec = one.load_spec
        for index in range(spec.vllm_cached_tokens // BLOCK, spec.kvpool_cached_tokens // BLOCK):
            rig.gpu[one.block_ids[0][index]] = self.objects[one.block_hashes[index].hex()]
        return str(one.req_id)


def copy(source: dict[int, Content], source_ids: Iterable[int], to: dict[int, Content], to_ids: Iterable[int]) -> None:
    for one, other in zip(source_ids, to_ids, strict=True):
        to[int(other)] = source[int(one)]


class Offloading(Stock):
    transfer: ClassVar[Given] = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 20}}

    def work(self, rig: FencedRig, metadata: Any) -> KVConnectorOutput:
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata

        report, finished = OffloadingWorkerMetadata(), set()
        for job_id, job in metadata.store_jobs.items():
            copy(rig.gpu, job.src_spec.block_ids, self.host, job.dst_spec.block_ids)
            report.mark_completed(job_id)
        self.loads += metadata.load_jobs.items()
        for job_id, job in self.ending():
            copy(self.host, job.src_spec.block_ids, rig.gpu, job.dst_spec.block_ids)
            report.mark_completed(job_id)
            finished.add(job.req_id)
        return KVConnectorOutput(finished_recving=finished, kv_connector_worker_meta=report)


class SimpleCPUOffload(Stock):
    transfer: ClassVar[Given] = {"kv_connector": "SimpleCPUOffloadConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 20}}

    def before(self, monkeypatch: Patch) -> None:
        from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler

        def with_blocks(gpu_config: Any, *sizes: Any) -> Any:  # vLLM divides bytes of tensors, which there are none of here
            return dataclasses.replace(gpu_config, num_blocks=256)

        monkeypatch.setattr(SimpleCPUOffloadScheduler, "_derive_cpu_config", staticmethod(with_blocks))

    def work(self, rig: FencedRig, metadata: Any) -> KVConnectorOutput:
        from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadWorkerMetadata

        stored = {}
        if metadata.store_event >= 0:
            copy(rig.gpu, metadata.store_gpu_blocks, self.host, metadata.store_cpu_blocks)
            stored[metadata.store_event] = 1
        if metadata.load_event >= 0:
            self.loads.append(metadata)
        finished: set[str] = set()
        for one in self.ending():
            copy(self.host, one.load_cpu_blocks, rig.gpu, one.load_gpu_blocks)
            finished |= set(one.load_event_to_reqs[one.load_event])
        return KVConnectorOutput(finished_recving=finished, kv_connector_worker_meta=SimpleCPUOffloadWorkerMetadata(stored))


class Nixl(Stock):
    """vLLM's NixlConnector; `producers` and `reading` are those of `test_transfers.TransferRig`."""

    transfer: ClassVar[Given] = {"kv_connector": "NixlConnector"}

    def __init__(self) -> None:
        super().__init__()
        self.producers: dict[str, FencedRig] = {}
        self.reading: dict[str, Any] = {}
        self.sent: set[str] = set()

    def work(self, rig: FencedRig, metadata: Any) -> KVConnectorOutput:
        self.reading |= metadata.reqs_to_recv
        finished = set()
        for request_id, order in [] if self.hold_loads else list(self.reading.items()):
            producer = self.producers[order.remote.engine_id]
            read_blocks(order, producer, rig)
            producer.stock.sent.add(order.remote.request_id)  # type: ignore[attr-defined]
            finished.add(request_id)
            del self.reading[request_id]
        sent, self.sent = self.sent, set()
        return KVConnectorOutput(finished_recving=finished, finished_sending=sent)


MakeStock = Callable[[], Stock]
STOCKS: dict[str, MakeStock] = {"none": Stock, "mooncake": lambda: MooncakeStore({}), "offloading": Offloading, "simple": SimpleCPUOffload}
TIERED = {name: make for name, make in STOCKS.items() if name != "none"}
every_stock = pytest.mark.parametrize("make_stock", STOCKS.values(), ids=STOCKS.keys())
every_tier = pytest.mark.parametrize("make_stock", TIERED.values(), ids=TIERED.keys())
CHUNK = 3 * BLOCK


def fenced(make_rig: MakeRig, stock: Stock, **options: Any) -> FencedRig:
    rig: FencedRig = make_rig(FencedRig, stock=stock, **options)
    rig.adopt(0)
    return rig


def pushed_out(make_rig: MakeRig, stock: Stock, **options: Any) -> FencedRig:
    """One whose tier holds the prompt, which its GPU has lost."""
    rig = fenced(make_rig, stock, num_blocks=12, **options)
    rig.serve(TOKENS)
    push_out(rig)
    return rig


def begin_load(rig: FencedRig) -> Any:
    rig.stock.hold_loads = True
    request = rig.add(TOKENS)
    rig.step()
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    return request


# ---------------------------------------------------------------------------------------------- what each change hides
CHANGES: dict[str, tuple[Callable[[Any], object], Callable[[Any], object]]] = {
    "an epoch": (lambda rig: rig.adopt(1), lambda rig: None),
    "other weights": (lambda rig: setattr(rig, "weights", "w1"), lambda rig: setattr(rig, "weights", "w0")),
    "a lost lease": (lambda rig: setattr(rig, "lease_until", 0.0), lambda rig: setattr(rig, "lease_until", float("inf"))),
}
"""And what ends each of them; an epoch's own names are found at once."""


@every_tier
@pytest.mark.parametrize("change", CHANGES)
def test_a_tier_finds_its_names_and_none_of_before_a_change(make_rig: MakeRig, make_stock: MakeStock, change: str) -> None:
    rig = pushed_out(make_rig, make_stock())
    assert found(rig) == WHOLE
    push_out(rig)
    begin, end = CHANGES[change]
    begin(rig)
    assert found(rig) == 0
    end(rig)
    push_out(rig)
    assert found(rig) == WHOLE


# ---------------------------------------------------------------------------------------------- who was there before
@every_stock
def test_a_request_that_runs_ends_on_what_it_had(make_rig: MakeRig, make_stock: MakeStock) -> None:
    rig = fenced(make_rig, make_stock(), max_batched_tokens=CHUNK)
    request = rig.add(TOKENS)
    rig.step()
    rig.adopt(1)
    assert rig.pins.old_epoch_requests() == 1
    rig.run()
    assert request.request_id in rig.finished
    assert rig.pins.old_epoch_requests() == 0
    assert found(rig) == 0


@every_stock
@pytest.mark.parametrize("back", [False, True])
def test_a_request_that_runs_over_a_push_names_nothing_more(make_rig: MakeRig, make_stock: MakeStock, back: bool) -> None:
    """Weights return. KV that was computed with others meanwhile must not be found under the names that return, too."""
    rig = fenced(make_rig, make_stock(), num_blocks=12, max_batched_tokens=CHUNK)
    rig.add(TOKENS)
    rig.step()
    rig.weights = "w1"
    rig.run()
    if back:
        rig.weights = "w0"
    push_out(rig)
    assert found(rig) <= (CHUNK if back else 0)


@every_stock
def test_a_request_that_waits_finds_nothing_old(make_rig: MakeRig, make_stock: MakeStock) -> None:
    rig = fenced(make_rig, make_stock())
    rig.serve(TOKENS)
    request = rig.add(TOKENS)
    rig.adopt(1)
    rig.run()
    assert rig.cached[request.request_id] == 0
    assert found(rig) == WHOLE


def test_an_answer_of_the_store_to_older_names_is_dropped(make_rig: MakeRig) -> None:
    stock = MooncakeStore({})
    rig = pushed_out(make_rig, stock)
    stock.hold_lookups = True
    request = rig.add(TOKENS)
    rig.step()
    assert request.request_id in stock.open
    rig.adopt(1)
    rig.step()
    stock.hold_lookups = False
    rig.run()
    assert rig.cached[request.request_id] == 0


@every_tier
def test_a_load_that_is_under_way_ends_and_is_nobody_elses(make_rig: MakeRig, make_stock: MakeStock) -> None:
    rig = pushed_out(make_rig, make_stock())
    request = begin_load(rig)
    rig.adopt(1)
    assert rig.pins.old_epoch_requests() == 1
    rig.release()
    rig.run()
    assert rig.cached[request.request_id] == WHOLE
    assert found(rig) == 0


@every_tier
@pytest.mark.parametrize("back", [False, True])
def test_a_load_over_a_push_is_nobody_elses(make_rig: MakeRig, make_stock: MakeStock, back: bool) -> None:
    rig = pushed_out(make_rig, make_stock())
    request = begin_load(rig)
    rig.weights = "w1"
    rig.release()
    rig.run()
    assert rig.stale_tokens.pop(request.request_id) == WHOLE  # what it was there for before the push
    if back:
        rig.weights = "w0"
    push_out(rig)
    assert found(rig) == (WHOLE if back else 0)


@every_tier
def test_a_preempted_request_is_named_anew(make_rig: MakeRig, make_stock: MakeStock) -> None:
    """vLLM's reset of running requests takes their blocks, and they look again."""
    rig = fenced(make_rig, make_stock(), num_blocks=12, max_batched_tokens=CHUNK)
    request = rig.add(TOKENS)
    rig.steps(2)
    rig.adopt(1)
    rig.scheduler.reset_prefix_cache(reset_running_requests=True)
    rig.stock.hold_lookups = True  # vLLM's Mooncake connector cannot resume a request in the step that it hears of its preemption in
    rig.step()
    rig.stock.hold_lookups = False
    rig.run()
    assert request.request_id in rig.finished
    push_out(rig)
    assert found(rig) == WHOLE


# ---------------------------------------------------------------------------------------------- resets
@pytest.mark.unclean
@pytest.mark.parametrize("with_fence", [False, True])
def test_a_reset_of_one_engine_empties_no_store(make_rig: MakeRig, with_fence: bool) -> None:
    stock = MooncakeStore({})
    rig = make_rig(FencedRig, stock=stock, fenced=with_fence)
    if with_fence:
        rig.adopt(0)
    rig.serve(TOKENS)
    assert stock.objects
    assert rig.scheduler.reset_prefix_cache(reset_connector=True)
    assert bool(stock.wiped) is not with_fence
    assert bool(stock.objects) is with_fence
    if with_fence:
        assert rig.pins.root.waiting_after_reset
        assert found(rig) == 0
        rig.adopt(1)
        assert found(rig) == 0
        rig.check_clean()


# ---------------------------------------------------------------------------------------------- errors of ours
@pytest.mark.unclean
@every_stock
@pytest.mark.parametrize("method", ["pin", "repin"])
def test_a_request_that_cannot_be_named_is_served_alone(make_rig: MakeRig, make_stock: MakeStock, method: str, monkeypatch: Patch) -> None:
    rig = fenced(make_rig, make_stock())
    rig.serve(TOKENS)
    rig.adopt(1)
    broken = FailsOnce(rig.pins, method, monkeypatch)
    served = rig.serve(TOKENS)
    assert broken.raised
    assert rig.cached[served] == 0
    assert sum(rig.stale_tokens.values()) == 0
    assert rig.leaks() == {}


@pytest.mark.unclean
def test_a_connector_that_cannot_follow_ends_the_names(make_rig: MakeRig, monkeypatch: Patch) -> None:
    rig = fenced(make_rig, Offloading(), max_batched_tokens=CHUNK)
    rig.add(TOKENS)
    rig.step()
    broken = FailsOnce(rig.pins, "on_rename", monkeypatch)
    rig.weights = "w1"
    rig.run()
    assert broken.raised
    assert [found(rig), found(rig)] == [0, 0]
    assert rig.pins.root.snapshot.in_use is False


# ---------------------------------------------------------------------------------------------- P/D
def transfers(make_rig: MakeRig) -> tuple[FencedRig, FencedRig, dict[str, Any]]:
    """A producer and a consumer, and what the producer says of the prompt."""
    producer, consumer = (fenced(make_rig, Nixl()) for _ in range(2))
    assert isinstance(consumer.stock, Nixl)
    config: Any = producer.vllm_config.kv_transfer_config
    consumer.stock.producers[str(config.engine_id)] = producer
    return producer, consumer, produce(producer)


@pytest.mark.parametrize("tagged", [True, False])
def test_kv_of_another_engine_has_our_names_only_with_its_tag(make_rig: MakeRig, tagged: bool) -> None:
    producer, consumer, handed = transfers(make_rig)
    assert handed["epochkv_tag"]["epoch"] == 0
    if not tagged:
        del handed["epochkv_tag"]
    request = consumer.add(TOKENS, params=handed)
    consumer.run()
    assert consumer.cached[request.request_id] == LENGTH - 1
    assert found(consumer) == (WHOLE if tagged else 0)
    producer.run()


def test_an_idle_engine_tells_routers_of_an_epoch(make_rig: MakeRig) -> None:
    rig = fenced(make_rig, Offloading(), kv_events=True)
    rig.serve(TOKENS)
    assert rig.scheduler.connector.take_events() == ()
    rig.adopt(1)
    assert rig.scheduler.has_requests(), "vLLM publishes from inside a step"
    assert 1 <= rig.run() <= 2
    assert not rig.scheduler.epochkv_fence.role.state.must_tell


def test_the_next_input_of_a_session_is_stored_under_its_own_names(make_rig: MakeRig) -> None:
    """It comes with its whole block table, which stock adds to the one that it has."""
    rig, half = fenced(make_rig, Offloading(), num_blocks=24), len(TOKENS) // 2
    session = rig.request(TOKENS[:half], max_tokens=1)
    session.resumable = True
    rig.scheduler.add_request(session)
    rig.step()
    more = rig.request(TOKENS[half - 1 :], max_tokens=1, request_id=session.request_id)
    more.resumable = True
    rig.scheduler.add_request(more)
    rig.step()
    whole = list(session.prompt_token_ids)
    rig.scheduler.finish_requests(session.request_id, RequestStatus.FINISHED_ABORTED)
    push_out(rig)
    again = rig.serve(whole)
    assert (rig.cached[again] > 0, rig.stale_tokens[again]) == (True, 0)
