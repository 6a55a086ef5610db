"""Engines with vLLM's own connectors, or none, and our fence: real schedulers, real scheduler halves, workers made of dictionaries.

What a connector keeps is *contents*, as in the rest of this layer, so that the oracle sees whose KV a request finds.
"""

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
from tests.support.scheduler import OwnRoot, Rig
from tests.support.scheduler_config import BLOCK, write_credentials
from tests.support.scheduler_worker import Content

POOL = "6f1c2d3e-0000-4000-8000-000000000001"


class Stock:
    """The worker half of one of vLLM's connectors. This one is none.

    Attributes:
        transfer: what `kv_transfer_config` says of it; None: there is no connector.
        hold_loads: loads end when this is taken back.
        hold_lookups: where the store is asked, its answer is not there yet.
    """

    transfer: ClassVar[dict[str, Any] | None] = None

    def __init__(self) -> None:
        self.hold_loads = self.hold_lookups = False

    def before(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Before the scheduler half is made."""

    def work(self, rig: FencedRig, metadata: Any) -> KVConnectorOutput | None:
        """A step's orders, behind its forward pass."""
        return None


class FencedRig(Rig):
    """One engine that has the fence without our connector.

    Args:
        stock: its connector's worker half.
        fenced: False: it is as vLLM made it.
    """

    def __init__(
        self,
        tmp: Path,
        *,
        monkeypatch: pytest.MonkeyPatch,
        stock: Stock,
        fenced: bool = True,
        change_config: Callable[[VllmConfig], object] = lambda config: None,
        **options: Any,
    ) -> None:
        self.stock = stock
        connection = {
            "pool": {"name": "policy", "uid": POOL},
            "hub": {"endpoint": "tcp://127.0.0.1:9", "credentials_dir": str(write_credentials(tmp / "fence"))},
        }
        monkeypatch.setenv("EPOCHKV_CONFIG", json.dumps(connection))
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
        """Loads that were held end with the next step."""
        self.stock.hold_loads = False

    def close(self) -> None:
        self.scheduler.shutdown()


class MooncakeStore(Stock):
    """vLLM's MooncakeStoreConnector; look-ups come before vLLM looks, or with a step between.

    Args:
        objects: what the store holds, by key; engines share it.

    Attributes:
        wiped: how often it was emptied.
        open: what is asked, by request.
    """

    transfer: ClassVar[dict[str, Any] | None] = {
        "kv_connector": "MooncakeStoreConnector",
        "kv_connector_extra_config": {"lookup_async": True},
    }

    def __init__(self, objects: dict[str, Content]) -> None:
        super().__init__()
        self.objects = objects
        self.wiped = 0
        self.open: dict[str, list[bytes]] = {}
        self._loads: list[Any] = []

    def before(self, monkeypatch: pytest.MonkeyPatch) -> None:
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
        """As vLLM's client."""
        self.open.pop(request_id, None)

    def reset(self) -> bool:
        """As vLLM's client: the whole store."""
        self.wiped += 1
        self.objects.clear()
        return True

    def work(self, rig: FencedRig, metadata: Any) -> KVConnectorOutput:
        from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import MooncakeStoreWorkerMetadata

        saved = {}
        for one in metadata.requests if metadata is not None else ():
            if one.load_spec is not None and one.load_spec.can_load:
                self._loads.append(one)
            if one.can_save:
                self._save(rig, one)
                saved[one.store_job_id] = 1
        finished = set() if self.hold_loads else {self._load(rig, one) for one in self._loads}
        if not self.hold_loads:
            self._loads.clear()
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
    """Block by block."""
    for one, other in zip(source_ids, to_ids, strict=True):
        to[int(other)] = source[int(one)]


class Offloading(Stock):
    """vLLM's OffloadingConnector, to host memory."""

    transfer: ClassVar[dict[str, Any] | None] = {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 20},
    }

    def __init__(self) -> None:
        super().__init__()
        self.host: dict[int, Content] = {}
        self._loads: dict[int, Any] = {}

    def work(self, rig: FencedRig, metadata: Any) -> KVConnectorOutput:
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata

        report, finished = OffloadingWorkerMetadata(), set()
        for job_id, job in metadata.store_jobs.items():
            copy(rig.gpu, job.src_spec.block_ids, self.host, job.dst_spec.block_ids)
            report.mark_completed(job_id)
        self._loads |= metadata.load_jobs
        for job_id, job in {} if self.hold_loads else dict(self._loads).items():
            copy(self.host, job.src_spec.block_ids, rig.gpu, job.dst_spec.block_ids)
            report.mark_completed(job_id)
            finished.add(job.req_id)
            del self._loads[job_id]
        return KVConnectorOutput(finished_recving=finished, kv_connector_worker_meta=report)


class SimpleCPUOffload(Stock):
    """vLLM's SimpleCPUOffloadConnector."""

    transfer: ClassVar[dict[str, Any] | None] = {
        "kv_connector": "SimpleCPUOffloadConnector",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 20},
    }

    def __init__(self) -> None:
        super().__init__()
        self.host: dict[int, Content] = {}
        self._loads: list[Any] = []

    def before(self, monkeypatch: pytest.MonkeyPatch) -> None:
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
            self._loads.append(metadata)
        finished: set[str] = set()
        for one in [] if self.hold_loads else self._loads:
            copy(self.host, one.load_cpu_blocks, rig.gpu, one.load_gpu_blocks)
            finished |= set(one.load_event_to_reqs[one.load_event])
        if not self.hold_loads:
            self._loads = []
        return KVConnectorOutput(finished_recving=finished, kv_connector_worker_meta=SimpleCPUOffloadWorkerMetadata(stored))


class Nixl(Stock):
    """vLLM's NixlConnector: a read brings what the producer's blocks hold then.

    Attributes:
        producers: other engines, by the id that NIXL gives them.
        reading: request -> NIXL's order, until the read ends.
    """

    transfer: ClassVar[dict[str, Any] | None] = {"kv_connector": "NixlConnector"}

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
            for mine, theirs in zip(order.local_block_ids, order.remote.block_ids, strict=True):
                for to, source in zip(reversed(mine), reversed(theirs), strict=False):
                    rig.gpu[to] = producer.gpu[source]
            producer.stock.sent.add(order.remote.request_id)  # type: ignore[attr-defined]
            finished.add(request_id)
            del self.reading[request_id]
        sent, self.sent = self.sent, set()
        return KVConnectorOutput(finished_recving=finished, finished_sending=sent)
