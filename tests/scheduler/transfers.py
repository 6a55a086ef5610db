"""Engines with our connector and vLLM's own NixlConnector: real schedulers, and for NIXL's worker one that reads contents.

A read happens at once, or when the consumer is told to. It brings what the producer's blocks hold then, whoever they belong to.
"""

from collections.abc import Mapping, Set
from typing import Any

from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorWorkerMetadata
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from tests.support.scheduler import OwnRoot, Rig, SharedStore

HAND_OVER = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}
"""What a proxy puts into the request to the producer."""


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
            for mine, theirs in zip(order.local_block_ids, order.remote.block_ids, strict=True):
                for to, source in zip(reversed(mine), reversed(theirs), strict=False):
                    self.gpu[to] = producer.gpu[source]
        if order.awaiting_kvs:
            made.finished_recving = {*(made.finished_recving or ()), request_id}
        if not self.fail_reads:
            producer.let_go({order.remote.request_id})

    def let_go(self, request_ids: Set[str] | None = None) -> None:
        """The blocks of these requests (or of all: their lease is over) are free after the next step."""
        gone = self.kept & request_ids if request_ids is not None else set(self.kept)
        self.kept -= gone
        self.sent |= gone

    def produce(self, tokens: list[int], **kwargs: Any) -> dict[str, Any]:
        """Compute a prompt for another engine; returns what the answer says of it."""
        request = self.add(tokens, params=dict(HAND_OVER), **kwargs)
        while request.request_id not in self.finished:
            self.step()
        return self.handed[request.request_id]

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
