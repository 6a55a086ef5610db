"""What a worker made of dictionaries holds, and that worker: GPU blocks, host slots and a store of *contents* instead of bytes.

A content says, for each token position, which weights computed its KV from which tokens, so that KV under a wrong name shows
as a wrong prefix or wrong weights, whoever made the mistake.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from vllm.exceptions import LoRAAdapterNotFoundError
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.model_manager import AdapterLRUCache, LRUCacheLoRAModelManager
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

from epochkv_connector.weights import rank as rank_calls
from epochkv_connector.weights.rank import HeldAdapters
from epochkv_connector.wire import JobAck, LoadJob, Phase, RankLayout, SaveJob, StepMetadata, Tier, WorkerReport

if TYPE_CHECKING:
    from tests.support.scheduler import Rig

Cell = tuple[str, bytes]  # (weights, digest of the tokens up to and including this one)
Content = tuple[Cell | None, ...]  # one block: a cell per token, or one of a recurrent state


class EngineCore:
    """As vLLM's: the executor is there when the scheduler, and with it the connector, is made."""

    def __init__(self, executor: FakeExecutor, build: Callable[[], Any]) -> None:
        self.model_executor = executor
        self.scheduler = build()

    def add_lora(self, lora_request: Any) -> bool:
        return bool(self.model_executor.collective_rpc("add_lora", args=(lora_request,)))


class _NoModules(LRUCacheLoRAModelManager):
    """vLLM's manager of adapters for a model that has no modules to put them on."""

    def __init__(self, num_adapters: int) -> None:
        self.lora_config = SimpleNamespace(max_loras=num_adapters, max_cpu_loras=num_adapters, lora_dtype=torch.float32)
        self.modules, self.packed_modules = {}, {}
        self.is_pooling_model = self._is_moe = self._enable_moe_shared_loras = self._enable_mixed_moe_lora_format = False
        self.lora_index_to_id = [None] * num_adapters
        self._registered_adapters = AdapterLRUCache(num_adapters, self.deactivate_adapter)
        self._active_adapters = AdapterLRUCache(num_adapters, self._deactivate_adapter)


class RankAdapters(LRUCacheWorkerLoRAManager):
    """vLLM's own cache of adapters on one rank, whose files are texts by path and whose tensors are made of them.

    Attributes:
        loads: paths, in the order they were read.
    """

    def __init__(self, disk: dict[str, str], num_adapters: int) -> None:
        self.disk = disk
        self.loads: list[str] = []
        self._adapter_manager = _NoModules(num_adapters)
        self.held = HeldAdapters()
        runner = SimpleNamespace(lora_manager=self)
        self.worker = SimpleNamespace(model_runner=runner, add_lora=self.add_adapter)

    def _load_adapter(self, lora_request: Any) -> LoRAModel:
        self.loads.append(lora_request.lora_path)
        if lora_request.lora_path not in self.disk:
            raise LoRAAdapterNotFoundError(lora_request.lora_name, lora_request.lora_path)
        return self.make(lora_request.lora_int_id, self.disk[lora_request.lora_path])

    @staticmethod
    def make(number: int, text: str) -> LoRAModel:
        values = torch.tensor(list(text.encode()), dtype=torch.float32)
        return LoRAModel(number, 1, {"m": LoRALayerWeights("m", 1, 1, values.view(1, -1), values.view(-1, 1).clone())})

    def text_of(self, request: Any) -> str:
        model = self._adapter_manager.list_adapters().get(request.lora_int_id)
        return bytes(int(value) for value in model.loras["m"].lora_a.flatten()).decode() if model is not None else ""


class FakeExecutor:
    """Worker ranks whose weights are a text each.

    Attributes:
        ranks: what each rank holds.
        layouts: what each rank says of its host slots.
        asked: per rank, (number, weights) of the last question.
        calls: methods that were called, ours by name.
        fails: methods that raise, after `weights` of the call took effect on the first rank.
        answers: replaces a rank's answer to a question.
        disk: what files of adapters hold, by path.
        adapters: those of each rank.
        on_call: told of each call before it takes effect.
    """

    def __init__(self, weights: str, layouts: Sequence[RankLayout], num_adapters: int = 8) -> None:
        self.layouts, num_ranks = layouts, len(layouts)
        self.disk: dict[str, str] = {}
        self.adapters = [RankAdapters(self.disk, num_adapters) for _ in range(num_ranks)]
        self.ranks = [weights] * num_ranks
        self.asked: list[tuple[int, str]] = [(-1, "")] * num_ranks
        self.calls: list[str] = []
        self.fails: set[str] = set()
        self.answers: Callable[[dict[str, Any]], dict[str, Any]] = lambda answer: answer
        self.is_sleeping = False
        self.on_call: Callable[[str], None] = lambda name: None
        self.late: list[list[int]] = [[] for _ in range(num_ranks)]
        self.replaced: list[list[tuple[int, int]]] = [[] for _ in range(num_ranks)]
        self.refused: list[bool] = [False] * num_ranks

    @property
    def engine_weights(self) -> str:
        return self.ranks[0] if len(set(self.ranks)) == 1 else "|".join(self.ranks)

    def write(self, weights: str, rank: int | None = None) -> None:
        for index in range(len(self.ranks)):
            if rank in (None, index):
                self.ranks[index] = weights

    def collective_rpc(self, method: Any, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: Any = None) -> list[Any]:
        name = method if isinstance(method, str) else method.__name__
        self.calls.append(name)
        self.on_call(name)
        answers = self._of_adapters(method, args) if self._is_about_adapters(method, args) else self._of_ours(method, args)
        if answers is not None:
            return answers
        weights = (kwargs or {}).get("weights")
        if name in self.fails:
            if weights is not None:
                self.ranks[0] = weights
            raise RuntimeError(f"{name} has failed")
        if weights is not None:
            self.write(weights)
        return [True] * len(self.ranks)

    def reset_encoder_cache(self) -> None:
        self.collective_rpc("reset_encoder_cache")

    def _answer(self, index: int, number: int) -> dict[str, Any]:
        held = self.ranks[index]
        self.asked[index] = (number, held)
        value = hashlib.sha256(held.encode()).digest()
        return self.answers({"number": number, "weights": value, "note": "", "rank": index, "naps": 0, "alone": ""})

    def _of_ours(self, method: Any, args: tuple[Any, ...]) -> list[Any] | None:
        if method is rank_calls.digest_weights:
            return [self._answer(index, *args) for index in range(len(self.ranks))]
        if method is rank_calls.is_unchanged:
            return [self.asked[index] == (args[0], held) for index, held in enumerate(self.ranks)]
        if method is rank_calls.layout:
            return list(self.layouts)
        return [0] * len(self.ranks) if method in (rank_calls.settle_for_sleep, rank_calls.is_asleep) else None

    @staticmethod
    def _is_about_adapters(method: Any, args: tuple[Any, ...]) -> bool:
        named = method in ("add_lora", "remove_lora") and bool(args)
        return named or method is rank_calls.digest_adapters or hasattr(method, "on_adapters")

    def _of_adapters(self, method: Any, args: tuple[Any, ...]) -> list[Any]:
        if method is rank_calls.digest_adapters:
            return [self.answers(self._about_adapters(index, *args)) for index in range(len(self.ranks))]
        if isinstance(method, str):
            return [getattr(one, method.replace("lora", "adapter"))(*args) for one in self.adapters]
        return [method.on_adapters(one) for one in self.adapters]

    def _about_adapters(self, index: int, number: int, wanted: Any, afresh: bool) -> dict[str, Any]:
        one = self.adapters[index]
        return {"number": number, "adapters": one.held.digest(one.worker, number, wanted, afresh), "note": "", "rank": index}

    def activate(self, requests: set[Any]) -> None:
        for one in self.adapters:
            one.set_active_adapters(requests, None)

    def looked(self, metadata: StepMetadata | None) -> None:
        """The forward pass of a step is over: each rank compares, as `working.WorkerRole`."""
        number = -1 if metadata is None else metadata.digest_number
        for index, held in enumerate(self.ranks):
            self.refused[index] = number >= 0 and self.asked[index] != (number, held)
            if self.refused[index]:
                self.late[index].append(number)
            if metadata is not None:
                adapters = self.adapters[index].held
                self.replaced[index] += adapters.replaced(metadata.newest_epoch)
                self.refused[index] |= not adapters.are_unchanged(metadata.adapters)


@dataclass
class SharedStore:
    """L2 for any number of rigs: keys to contents; can be told to lose or delay."""

    objects: dict[str, Content] = field(default_factory=dict)
    answer_exists: bool = True
    down: bool = False
    lose: Callable[[str], bool] = lambda key: False
    asked: list[str] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)
    pending: list[tuple[Future[Sequence[bool]], list[str]]] = field(default_factory=list)

    def start(self) -> None: ...
    def stats(self) -> dict[str, float]:
        return {"state": 2.0, "breaker_open": float(self.down), "exists_calls": float(len(self.asked))}

    def exists(self, keys: Sequence[str], timeout: float = 1.0) -> Future[Sequence[bool]]:
        """As the store client's: a future, answered at once unless the store is silent."""
        self.asked.extend(keys)
        future: Future[Sequence[bool]] = Future()
        if self.down:
            future.set_exception(ConnectionError("the store is down"))
        elif self.answer_exists:
            future.set_result([key in self.objects for key in keys])
        else:
            self.pending.append((future, list(keys)))
        return future

    def answer_pending(self) -> None:
        for future, keys in self.pending:
            if not future.cancelled():
                future.set_result([key in self.objects for key in keys])
        self.pending.clear()

    def close(self, timeout: float = 5.0) -> bool:
        return True


class FakeWorker:
    """One rank: runs jobs on contents instead of bytes, at once or when told to.

    Attributes:
        num_slots: a job that names another slot fails.
        bad_jobs: those that did.
    """

    def __init__(self, rig: Rig, rank: int) -> None:
        self.rig = rig
        self.rank = rank
        self.num_slots = rig.executor.layouts[rank].num_slots
        self.bad_jobs: list[int] = []
        self.slots: dict[int, Content] = {}
        self.loads: list[LoadJob] = []
        self.saves: list[SaveJob] = []
        self.copied: dict[int, SaveJob] = {}  # and not agreed upon
        self.finished: set[str] = set()
        self.failed: set[str] = set()
        self.acks: list[JobAck] = []
        self.invalidated: list[str] = []
        self.cancelled: set[int] = set()
        self.hold_loads = False
        self.hold_saves = False
        self.fail_loads: Callable[[LoadJob], bool] = lambda job: False

    def start_step(self, metadata: StepMetadata) -> None:
        """Take a step's orders; runs after the step's forward pass."""
        self._agreed(metadata)
        self.invalidated.extend(metadata.invalidated)
        self.finished.update(metadata.invalidated)
        self.failed.update(metadata.invalidated)
        self.loads.extend(metadata.loads)
        self.cancelled.update(metadata.cancelled)
        refused = self.rig.executor.refused[self.rank]
        for save in metadata.saves:
            if refused or self._is_bad(save):
                self.acks += [JobAck(save.job_id, self.rank, phase, failed=True) for phase in save.phases]
            else:
                self.saves.append(save)
        self.work()

    def _is_bad(self, job: SaveJob | LoadJob) -> bool:
        bad = any(not 0 <= move.slot < self.num_slots for move in job.moves)
        if bad:
            self.bad_jobs.append(job.job_id)
        return bad

    def _agreed(self, metadata: StepMetadata) -> None:
        for job_id in metadata.agreed:
            self._put(self.copied.pop(job_id))
        for job_id in metadata.refused:
            save = self.copied.pop(job_id, None)
            if save is not None:
                self.acks.append(JobAck(job_id, self.rank, Phase.STORED, failed=True))

    def fail_saves(self) -> None:
        """Those that are held fail."""
        saves, self.saves = self.saves, []
        self.acks += [JobAck(save.job_id, self.rank, phase, failed=True) for save in saves for phase in save.phases]

    def work(self) -> None:
        if not self.hold_saves:
            saves, self.saves = self.saves, []
            for save in saves:
                self._save(save)
        if not self.hold_loads:
            loads, self.loads = self.loads, []
            for load in loads:
                self._load(load)

    def _key(self, namespace: str, group: int, block_hash: bytes) -> str:
        return f"{namespace}/g{group}/r{self.rank}/{block_hash.hex()}"

    def _save(self, job: SaveJob) -> None:
        for move in job.moves:
            if move.copy:
                self.slots[move.slot] = self.rig.gpu[move.gpu_block]
        self.acks.append(JobAck(job.job_id, self.rank, Phase.COPIED))
        if job.namespace is None:
            return
        if len(self.rig.executor.ranks) > 1:
            self.copied[job.job_id] = job
            return
        self._put(job)

    def _put(self, job: SaveJob) -> None:
        store = self.rig.store
        assert store is not None
        assert job.namespace is not None
        for move in job.moves:
            if move.put:
                store.objects.setdefault(self._key(job.namespace, move.group, move.block_hash), self.slots[move.slot])
        self.acks.append(JobAck(job.job_id, self.rank, Phase.STORED))

    def _load(self, job: LoadJob) -> None:
        num_failed = 0
        filled: list[int] = []
        broken = self.fail_loads(job) or self._is_bad(job) or job.job_id in self.cancelled
        for move in job.moves:
            content: Content | None = None
            if move.source is Tier.HOST:
                content = self.slots.get(move.slot)
            elif self.rig.store is not None and job.namespace is not None:
                key = self._key(job.namespace, move.group, move.block_hash)
                self.rig.store.fetched.append(key)
                content = None if self.rig.store.lose(key) else self.rig.store.objects.get(key)
            if content is None or broken:
                num_failed += 1
                continue
            if not job.prefetch:
                self.rig.gpu[move.gpu_block] = content
            if move.source is Tier.STORE:
                self.slots[move.slot] = content
                filled.append(move.slot)
        if not job.prefetch:
            self.finished.add(job.request_id)
            self.failed.update([job.request_id] if num_failed else [])
        self.acks.append(JobAck(job.job_id, self.rank, Phase.LOADED, failed=num_failed > 0, filled_slots=tuple(filled)))

    def results(self) -> tuple[set[str], set[str]]:
        out = self.finished, self.failed
        self.finished, self.failed = set(), set()
        return out

    def poll_acks(self) -> WorkerReport:
        acks, self.acks = self.acks, []
        late, self.rig.executor.late[self.rank] = self.rig.executor.late[self.rank], []
        replaced, self.rig.executor.replaced[self.rank] = self.rig.executor.replaced[self.rank], []
        return WorkerReport(acks=acks, late=late, replaced=replaced)
