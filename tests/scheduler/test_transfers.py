"""P/D: KV that NIXL brings from another engine has our names if that engine has shown our tag. If not, it is its request's alone.

Engines have our connector and vLLM's own NixlConnector: real schedulers, and for NIXL's worker one that reads contents. A read happens at
once, or when the consumer is told to. It brings what the producer's blocks hold then, whoever they belong to.
"""

from collections.abc import Callable, Mapping, Set
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorWorkerMetadata
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from tests.scheduler.rigs import LENGTH, TOKENS, WHOLE, FailsOnce, MakeRig, found, push_out
from tests.support.scheduler import BLOCK, OwnRoot, RequestStatus, Rig, SharedStore

HAND_OVER = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}
"""What a proxy puts into the request to the producer."""


def produce(rig: Rig, tokens: list[int] = TOKENS) -> dict[str, Any]:
    """Compute a prompt for another engine; returns what the answer says of it."""
    request = rig.add(tokens, params=dict(HAND_OVER))
    while request.request_id not in rig.finished:
        rig.step()
    return rig.handed[request.request_id]


def read_blocks(order: Any, producer: Rig, consumer: Rig) -> None:
    """What NIXL's order asks for, from the end of the prompt."""
    for mine, theirs in zip(order.local_block_ids, order.remote.block_ids, strict=True):
        for to, source in zip(reversed(mine), reversed(theirs), strict=False):
            consumer.gpu[to] = producer.gpu[source]


class TransferRig(Rig):
    """An engine with both connectors.

    Args:
        ours_first: of the children.
        lease: NIXL's `kv_lease_duration`.

    Attributes:
        producers: other engines, by the id that NIXL gives them.
        hold_reads, fail_reads: of this engine's reads.
        reading: request -> NIXL's order, until the read ends.
        kept: requests whose blocks another engine may read.
        sent: those that were read, or whose lease is over, and that are not reported yet.
    """

    def __init__(self, *args: Any, ours_first: bool = True, lease: int = 30, policy: str = "recompute", **kwargs: Any) -> None:
        self.producers: dict[str, TransferRig] = {}
        self.hold_reads = self.fail_reads = False
        self.reading: dict[str, Any] = {}
        self.kept: set[str] = set()
        self.sent: set[str] = set()
        self._ours = 0 if ours_first else 1

        def both(config: VllmConfig) -> None:
            config.kv_transfer_config = with_nixl(config.kv_transfer_config, self._ours, policy, {"kv_lease_duration": lease})

        super().__init__(*args, change_config=both, **kwargs)

    @property
    def engine_id(self) -> str:
        assert self.vllm_config.kv_transfer_config is not None
        return str(self.vllm_config.kv_transfer_config.engine_id)

    def update(self, output: Any) -> None:
        children = output.kv_connector_metadata.metadata
        output.kv_connector_metadata = children[self._ours]
        self.reading |= children[1 - self._ours].reqs_to_recv
        self.kept |= children[1 - self._ours].reqs_in_batch
        super().update(output)

    def _connector_output(self, output: Any) -> KVConnectorOutput:
        made = super()._connector_output(output)
        reports: list[Any] = [None, None]
        reports[self._ours] = made.kv_connector_worker_meta
        made.kv_connector_worker_meta = MultiKVConnectorWorkerMetadata(tuple(reports))
        made.finished_sending, self.sent = self.sent, set()
        for request_id, order in [] if self.hold_reads else list(self.reading.items()):
            del self.reading[request_id]
            self._read(request_id, order, made)
        return made

    def _read(self, request_id: str, order: Any, made: KVConnectorOutput) -> None:
        producer = self.producers[order.remote.engine_id]
        if self.fail_reads:
            made.failed_recving = {*(made.failed_recving or ()), request_id}
            made.invalid_block_ids = {*made.invalid_block_ids, *order.local_block_ids[0]}
        elif order.awaiting_kvs:
            read_blocks(order, producer, self)
        if order.awaiting_kvs:
            made.finished_recving = {*(made.finished_recving or ()), request_id}
        if not self.fail_reads:
            producer.let_go({order.remote.request_id})

    def let_go(self, request_ids: Set[str] | None = None) -> None:
        """The blocks of these requests (or of all: their lease is over) are free after the next step."""
        gone = self.kept & request_ids if request_ids is not None else set(self.kept)
        self.kept -= gone
        self.sent |= gone

    def take_over(self, tokens: list[int], handed: Mapping[str, Any], **kwargs: Any) -> Request:
        """A request as a proxy sends it on, whose transfer has begun."""
        request = self.add(tokens, params=dict(handed), **kwargs)
        self.step()
        return request


def with_nixl(ours: Any, place: int, policy: str, nixl: Mapping[str, Any]) -> KVTransferConfig:
    """A MultiConnector of this connector of ours and NIXL's."""
    children: list[dict[str, Any]] = [{"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_connector_extra_config": dict(nixl)}]
    names = ("kv_connector", "kv_connector_module_path", "kv_role", "kv_connector_extra_config")
    children.insert(place, {name: getattr(ours, name) for name in names})
    return KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_load_failure_policy=policy, kv_connector_extra_config={"connectors": children}
    )


def engines(make_rig: Any, **options: Any) -> tuple[TransferRig, TransferRig]:
    """A producer and a consumer of one pool in epoch 0, each with an L2 of its own, so that it shows who has saved."""
    made = []
    for _ in range(2):
        rig: TransferRig = make_rig(TransferRig, store=SharedStore(), **options)
        root: Any = rig.pins.root
        root._global = OwnRoot(root.snapshot.root)
        rig.adopt(0)
        made.append(rig)
    producer, consumer = made
    consumer.producers[producer.engine_id] = producer
    return producer, consumer


# ---------------------------------------------------------------------------------------------- what is shared
BLOCKS = WHOLE // BLOCK


def begin(make_rig: MakeRig, **options: Any) -> tuple[TransferRig, TransferRig, Any]:
    producer, consumer = engines(make_rig, **options)
    consumer.hold_reads = True
    request = consumer.take_over(TOKENS, produce(producer))
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert set(consumer.reading) == {request.request_id}
    return producer, consumer, request


def end(producer: TransferRig, consumer: TransferRig) -> None:
    """All that is under way ends."""
    consumer.hold_reads = False
    consumer.run()
    producer.run()


@pytest.mark.parametrize("ours_first", [True, False])
def test_kv_under_our_tag_is_shared_and_saved(make_rig: MakeRig, ours_first: bool) -> None:
    producer, consumer, request = begin(make_rig, ours_first=ours_first)
    assert consumer.store.objects == {}
    end(producer, consumer)
    assert consumer.cached[request.request_id] == LENGTH - 1
    assert set(consumer.store.objects) == set(producer.store.objects)
    assert len(consumer.store.objects) == BLOCKS
    assert found(consumer) == WHOLE
    end(producer, consumer)
    assert consumer.pins.counters["foreign_kv_requests"] == 0


def changed(handed: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {**handed, "epochkv_tag": {**handed["epochkv_tag"], **fields}}


BAD = {
    "none": lambda handed: {key: value for key, value in handed.items() if key != "epochkv_tag"},
    "text": lambda handed: {**handed, "epochkv_tag": "yes"},
    "empty": lambda handed: {**handed, "epochkv_tag": {}},
    "pool": lambda handed: changed(handed, pool="another"),
    "epoch": lambda handed: changed(handed, epoch=1),
    "weights": lambda handed: changed(handed, weights="00" * 32),
    "fingerprint": lambda handed: changed(handed, fingerprint="00" * 32),
    "adapter": lambda handed: changed(handed, adapter="00" * 32),
    "early": lambda handed: changed(handed, made=handed["epochkv_tag"]["made"] - 3600),
    "late": lambda handed: changed(handed, made=handed["epochkv_tag"]["made"] + 3600),
    "never": lambda handed: changed(handed, made=None),
    "nan": lambda handed: changed(handed, made=float("nan")),
    "forever": lambda handed: changed(handed, seconds="forever"),
}


@pytest.mark.parametrize("spoil", BAD.values(), ids=BAD.keys())
def test_kv_under_another_tag_belongs_to_its_request_alone(make_rig: MakeRig, spoil: Any) -> None:
    producer, consumer = engines(make_rig)
    handed = produce(producer)
    request = consumer.take_over(TOKENS, spoil(handed))
    end(producer, consumer)
    assert consumer.cached[request.request_id] == LENGTH - 1
    assert consumer.store.objects == {}
    assert consumer.pins.counters["foreign_kv_requests"] == 1
    assert found(consumer) == 0
    end(producer, consumer)


@pytest.mark.unclean
def test_the_tag_is_beside_what_nixl_says(make_rig: MakeRig) -> None:
    producer, consumer = engines(make_rig)
    handed = produce(producer)
    tag, maker = handed["epochkv_tag"], consumer.pins.maker

    def vouches(tokens: list[int] = TOKENS, media: str = "", **changes: Any) -> bool:
        features = [SimpleNamespace(identifier=media)] if media else []
        return maker.vouches(
            SimpleNamespace(kv_transfer_params={"epochkv_tag": {**tag, **changes}}, prompt_token_ids=tokens, mm_features=features)
        )

    assert vouches(seconds=15), "a proxy writes numbers as it likes"
    others = (vouches([*TOKENS, 1]), vouches([TOKENS[0] + 1, *TOKENS[1:]]), vouches(media="a"), vouches(made=0, seconds=1e12))
    assert not any(others), "clients see tags, and send them"
    assert handed["do_remote_prefill"] is True
    assert handed["remote_engine_id"] == producer.engine_id
    assert set(handed["epochkv_tag"]) == {"pool", "epoch", "fingerprint", "weights", "made", "seconds", "signature"}
    assert handed["epochkv_tag"]["seconds"] == 15.0


@pytest.mark.unclean
def test_a_producer_whose_weights_change_meanwhile_shows_no_tag(make_rig: MakeRig) -> None:
    producer, _ = engines(make_rig, max_batched_tokens=4 * BLOCK)
    request = producer.add(TOKENS, params={"do_remote_decode": True})
    producer.step()
    producer.weights = "w1"
    producer.step()
    producer.weights = "w0"
    while request.request_id not in producer.finished:
        producer.step()
    assert "epochkv_tag" not in producer.handed[request.request_id]


@pytest.mark.parametrize(("late", "shared"), [(-6, False), (-4, True), (4, True), (6, False)])
def test_half_of_the_lease_is_for_clocks_that_differ(make_rig: MakeRig, late: float, shared: bool) -> None:
    producer, consumer = engines(make_rig, lease=10)
    handed = produce(producer)
    consumer.pins.maker.clock = lambda: handed["epochkv_tag"]["made"] + late
    consumer.take_over(TOKENS, handed)
    end(producer, consumer)
    assert found(consumer) == (WHOLE if shared else 0)


# ---------------------------------------------------------------------------------------------- while the transfer runs
def back_and_forth(rig: TransferRig) -> None:
    rig.weights = "w1"
    rig.step()
    rig.weights = "w0"


CHANGES: dict[str, tuple[Callable[[TransferRig], object], int]] = {
    "an epoch": (lambda rig: rig.adopt(1), 0),
    "other weights": (lambda rig: setattr(rig, "weights", "w1"), LENGTH - 1),
    "other weights, and those of before": (back_and_forth, 0),
    "a lost lease": (lambda rig: setattr(rig, "lease_until", 0.0), 0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_during_the_transfer_leaves_its_blocks_unnamed(make_rig: MakeRig, change: str) -> None:
    """The request itself goes on with them, whatever weights they are of."""
    producer, consumer, request = begin(make_rig)
    do, num_stale = CHANGES[change]
    do(consumer)
    end(producer, consumer)
    consumer.lease_until = float("inf")
    assert consumer.stale_tokens.pop(request.request_id) == num_stale
    assert consumer.store.objects == {}
    assert found(consumer) == 0
    end(producer, consumer)


def test_what_is_read_after_the_producer_gave_the_blocks_away_has_no_name(make_rig: MakeRig) -> None:
    """NIXL does not tell the consumer. Its request is lost; no other request may find the blocks."""
    producer, consumer, request = begin(make_rig, num_blocks=12)
    producer.let_go()
    push_out(producer)
    now = consumer.pins.maker.clock()
    consumer.pins.maker.clock = lambda: now + 30
    end(producer, consumer)
    assert consumer.foreign_tokens.pop(request.request_id) > 0
    assert consumer.store.objects == {}
    assert found(consumer) == 0
    end(producer, consumer)


@pytest.mark.parametrize("ours_first", [True, False])
def test_a_transfer_that_fails_is_computed_and_shared(make_rig: MakeRig, ours_first: bool) -> None:
    producer, consumer, request = begin(make_rig, ours_first=ours_first)
    consumer.fail_reads = True
    consumer.hold_reads = False
    consumer.run()
    assert consumer.cached[request.request_id] == 0
    assert len(consumer.store.objects) == BLOCKS
    assert found(consumer) == WHOLE
    producer.let_go()
    end(producer, consumer)


def test_a_request_that_ends_during_its_transfer_saves_nothing(make_rig: MakeRig) -> None:
    """vLLM counts its tokens as computed."""
    producer, consumer, request = begin(make_rig)
    assert request.num_computed_tokens == LENGTH
    consumer.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
    consumer.steps(2)
    assert consumer.store.objects == {}
    assert consumer.tiers.stats()["slots_indexed"] == 0
    end(producer, consumer)


@pytest.mark.unclean
def test_an_error_of_ours_when_the_transfer_ends_costs_a_recompute(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    producer, consumer, request = begin(make_rig)
    broken = FailsOnce(consumer.side.requests, "report", monkeypatch)
    end(producer, consumer)
    assert broken.raised
    assert consumer.workers[0].invalidated == [request.request_id]
    assert consumer.cached[request.request_id] == 0
    assert consumer.store.objects == {}
    assert consumer.leaks() == {}


# ---------------------------------------------------------------------------------------------- who answers
@pytest.mark.parametrize("ours_first", [True, False])
def test_no_tier_answers_for_what_another_engine_keeps(make_rig: MakeRig, ours_first: bool) -> None:
    producer, consumer = engines(make_rig, num_blocks=12, ours_first=ours_first)
    consumer.serve(TOKENS)
    push_out(consumer)
    asked = len(consumer.store.asked)
    request = consumer.take_over(TOKENS, produce(producer))
    end(producer, consumer)
    assert consumer.cached[request.request_id] == LENGTH - 1
    assert len(consumer.store.asked) == asked
    assert consumer.side.counters["tokens_hit_host"] == 0
    push_out(consumer)
    assert found(consumer) == WHOLE  # they do for anybody else


def test_a_prompt_that_the_gpu_holds_is_not_read_again(make_rig: MakeRig) -> None:
    producer, consumer = engines(make_rig)
    whole = [*TOKENS[:WHOLE], 7]
    consumer.serve(whole)
    handed = produce(producer, whole)
    consumer.hold_reads = True
    consumer.take_over(whole, handed)
    assert [len(order.local_block_ids[0]) for order in consumer.reading.values()] == [1]
    end(producer, consumer)


@pytest.mark.parametrize(("policy", "loads"), [("recompute", True), ("fail", False)])
def test_the_policy_of_the_multiconnector_counts(make_rig: MakeRig, policy: str, loads: bool) -> None:
    producer, _ = engines(make_rig, num_blocks=12, policy=policy)
    producer.serve(TOKENS)
    push_out(producer)
    assert found(producer) == (WHOLE if loads else 0)
    assert producer.scheduler.recompute_kv_load_failures is loads
    producer.connector.set_xfer_handshake_metadata_pp_aware({(1, 0): None})  # what NIXL's pipeline ranks say of themselves
