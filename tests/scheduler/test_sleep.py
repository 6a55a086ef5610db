"""vLLM's sleep unmaps the memory of weights and KV: nothing of ours may touch it then.

An engine runs in a process of its own, and its memory is really unmapped: a copy or a digest that touches it ends the process by a signal.
It has vLLM's scheduler and its executor's sleep, our scheduler role, and our worker role with its copy threads over tensors in such memory.
What each block of KV was computed from is written into its bytes, so that the oracle judges what copies have moved.

    python -m tests.scheduler.test_sleep FOLDER FAULT
"""

import ctypes
import hashlib
import itertools
import mmap
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.executor.abstract import Executor

from epochkv_connector.connector import EpochKVConnector
from epochkv_connector.scheduler.weight_changes import WeightChanges
from epochkv_connector.weights import rank as rank_calls
from epochkv_connector.wire import BlockMove, JobAck, LoadJob, Phase, SaveJob, StepMetadata, WorkerReport
from epochkv_connector.worker.staging import StagingStream
from epochkv_fence.protocol.messages import ASLEEP
from tests.scheduler.rigs import LENGTH, TOKENS, WHOLE, found, push_out
from tests.support import scheduler
from tests.support.scheduler import BLOCK, RequestStatus, Rig, prompt
from tests.support.scheduler_config import HEAD, rank_kv_cache_config
from tests.support.scheduler_oracle import EMPTY
from tests.support.scheduler_worker import Content, FakeExecutor

NUM_BLOCKS = 24  # room for a request that runs beside one that loads
SLOW_SECONDS = 0.1
NOTHING, READ_WRITE = 0, 3
libc = ctypes.CDLL(None, use_errno=True)


class Memory:
    """Pages that can be unmapped: whoever touches them then gets a signal. What was in them is lost."""

    def __init__(self, num_bytes: int) -> None:
        self._map = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def protect(self, access: int) -> None:
        if access == NOTHING:
            self._map.madvise(mmap.MADV_DONTNEED)
        assert libc.mprotect(ctypes.c_void_p(self.bytes.data_ptr()), ctypes.c_size_t(self.bytes.numel()), access) == 0


class Worker:
    """vLLM's worker, as far as sleep goes.

    Attributes:
        hooks: it tells the connector of sleep, as from vLLM 0.33 on.
        moves: the memory of KV is elsewhere after each sleep.
    """

    def __init__(self) -> None:
        self.rank, self.hooks, self.moves = 0, False, False
        self.kept: tuple[set[str], set[str]] = set(), set()
        self.acks: list[JobAck] = []
        self.vllm_config: Any = None
        self.connector: Any = None
        self.weights = Memory(mmap.PAGESIZE)
        self._model = torch.nn.Module()
        self._model.register_parameter("w", torch.nn.Parameter(self.weights.bytes, requires_grad=False))
        self._kept: bytes | None = None
        self._lay_out()

    def _lay_out(self) -> None:
        self.memory = Memory(2 * NUM_BLOCKS * BLOCK * HEAD * 4)
        self.kv = self.memory.bytes.view(torch.float32).view(2, NUM_BLOCKS, BLOCK, 1, HEAD)

    def get_model(self) -> Any:
        return self._model

    def hold(self, weights: str) -> None:
        self.weights.bytes.copy_(torch.frombuffer(bytearray(hashlib.sha256(weights.encode()).digest() * 128), dtype=torch.uint8))

    def sleep(self, level: int = 1) -> None:
        if self.hooks:
            self.connector.unregister_kv_caches()
        self._kept = bytes(self.weights.bytes.numpy()) if level == 1 else None
        for memory in (self.weights, self.memory):
            memory.protect(NOTHING)

    def wake_up(self, tags: list[str] | None = None) -> None:
        if tags is None or "weights" in tags:
            self.weights.protect(READ_WRITE)
            if self._kept is not None:
                self.weights.bytes.copy_(torch.frombuffer(bytearray(self._kept), dtype=torch.uint8))
        if tags is None or "kv_cache" in tags:
            if self.moves:
                self._lay_out()
                self.connector.register_kv_caches({"layer0": self.kv})
            else:
                self.memory.protect(READ_WRITE)
            if self.hooks:
                self.connector.restore_kv_caches()

    # ------------------------------------------------------------------ what the rig asks of a worker
    def start_step(self, metadata: StepMetadata) -> None:
        self.connector.bind_connector_metadata(metadata)
        self.connector.start_load_kv(SimpleNamespace(attn_metadata=None))
        self.connector.wait_for_save()
        self.connector.clear_connector_metadata()

    def results(self) -> tuple[set[str], set[str]]:
        told = self.connector.get_transfer_results(set())
        finished, failed = self.kept
        self.kept = set(), set()
        return {*(told.finished_recving or ()), *finished}, {*(told.failed_recving or ()), *failed}

    def poll_acks(self) -> WorkerReport:
        report = self.connector.build_connector_worker_meta()
        report.acks[:0], self.acks = self.acks, []
        return report


class SleepingExecutor(FakeExecutor):
    sleep, wake_up = Executor.sleep, Executor.wake_up
    is_sleeping = property(lambda self: bool(self.sleeping_tags), lambda self, value: None)

    def __init__(self, weights: str, *args: Any) -> None:
        super().__init__(weights, *args)
        self.sleeping_tags: set[str] = set()
        self.worker = Worker()
        self.worker.hold(weights)

    def collective_rpc(self, method: Any, timeout: float | None = None, args: Any = (), kwargs: Any = None) -> list[Any]:
        if callable(method):
            return [method(self.worker, *args)]
        if method in ("sleep", "wake_up"):
            return [getattr(self.worker, method)(*args, **(kwargs or {}))]
        return super().collective_rpc(method, timeout, args, kwargs)

    def write(self, weights: str, rank: int | None = None) -> None:
        super().write(weights, rank)
        self.worker.hold(weights)

    def looked(self, metadata: StepMetadata | None) -> None:
        """Our worker role does."""


class SleepingRig(Rig):
    """An engine over such a worker; its KV tensors hold a digest of each block's content."""

    executor: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._contents: dict[bytes, Content] = {}
        self.strangers = itertools.count(10**9, 2)  # jobs that the scheduler role knows nothing of
        super().__init__(*args, **kwargs)
        self.workers = [self.executor.worker]  # type: ignore[list-item]

    def _make_scheduler(self) -> Any:
        worker, config = self.executor.worker, rank_kv_cache_config(self.options)
        worker.vllm_config = self.vllm_config
        worker.connector = EpochKVConnector(self.vllm_config, KVConnectorRole.WORKER, config)
        worker.connector.register_kv_caches({"layer0": worker.kv})
        return super()._make_scheduler()

    def _forward(self, output: Any) -> Any:
        """KV is what the tensors hold, before and after."""
        rows = self.executor.worker.kv[0].view(torch.uint8).view(NUM_BLOCKS, -1)
        for block in range(NUM_BLOCKS):
            self.gpu[block] = self._contents.get(bytes(rows[block, :32].numpy()), EMPTY)
        before, made = dict(self.gpu), super()._forward(output)
        for block, content in self.gpu.items() - before.items():
            digest = hashlib.sha256(repr(content).encode()).digest()
            self._contents[digest] = content
            rows[block, :32] = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        return made

    def run(self, max_steps: int = 5000) -> int:
        return super().run(max_steps)


class SlowCopies:
    """Copies that take long, and say when they begin."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began = {"gather": threading.Event(), "scatter": threading.Event()}
        self._slow = False
        for name in self.began:
            monkeypatch.setattr(StagingStream, name, self._slowly(name, getattr(StagingStream, name)))

    def _slowly(self, name: str, copy: Callable[..., None]) -> Callable[..., None]:
        def copying(*args: Any) -> None:
            if self._slow:
                self.began[name].set()
                time.sleep(SLOW_SECONDS)
            copy(*args)

        return copying

    @contextmanager
    def slow(self) -> Iterator[None]:
        for event in self.began.values():
            event.clear()
        self._slow = True
        yield
        self._slow = False


ORDERS: tuple[list[list[str] | None], ...] = ([None], [["weights"], ["kv_cache"]], [["kv_cache"], ["weights"]])


def sleep_and_wake(rig: SleepingRig, copies: SlowCopies, number: int, level: int, order: list[list[str] | None]) -> None:
    """One sleep with a load and a save under way. Afterwards the engine shares as before."""
    rig.executor.sleep(level)  # without a word to the scheduler, whose cache has names of what is gone
    rig.executor.wake_up()
    if level == 1:
        found(rig)
    rig.adopt(2 * number, f"w{number}")
    found(rig)
    push_out(rig)
    with copies.slow():
        saving = rig.add(prompt(2, LENGTH), max_tokens=BLOCK)
        loading = rig.add(TOKENS)
        rig.step()
        assert (saving.status, loading.status) == (RequestStatus.RUNNING, RequestStatus.WAITING_FOR_REMOTE_KVS)
        assert all(event.wait(10) for event in copies.began.values()), "both copies are under way"
        rig.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        rig.executor.sleep(level)
        time.sleep(2 * SLOW_SECONDS)  # copies that were left come to the memory
    check_asleep(rig)
    for tags in order:
        check_asleep(rig)
        rig.executor.wake_up(tags)
        if level == 2 and (tags is None or "weights" in tags):
            rig.weights = f"w{number + 1}"
    rig.run()
    assert rig.scheduler.reset_prefix_cache(reset_connector=True)
    rig.adopt(2 * number + 1)
    assert found(rig) == 0
    assert rig.side.hooks.weights()[0] is not None
    push_out(rig)
    copied = num_loaded(rig)
    assert found(rig) == WHOLE
    assert num_loaded(rig) == copied + WHOLE // BLOCK, "it came from L1"


def num_loaded(rig: SleepingRig) -> float:
    return float(rig.executor.worker.connector._worker.stats().get("copy_load_blocks", 0.0))


def check_asleep(rig: SleepingRig) -> None:
    """The engine says so, looks at nothing, and copies nothing that it is given where the memory of KV is unmapped."""
    assert rig.side.hooks.weights() == (None, ASLEEP)
    rig.watch.when_idle()
    if "kv_cache" not in rig.executor.sleeping_tags:
        return
    worker, ours = rig.executor.worker, next(rig.strangers)
    moves = (BlockMove(0, 0, 1, 1, b"h" * 32),)
    load, save = LoadJob(ours, "asleep", None, moves, 30.0), SaveJob(ours + 1, "asleep", None, moves, 30.0)
    worker.start_step(StepMetadata(loads=(load,), saves=(save,)))
    finished, failed = worker.results()
    acks = worker.poll_acks().acks
    assert {(ack.job_id, ack.phase) for ack in acks if ack.failed} >= {(ours, Phase.LOADED), (ours + 1, Phase.COPIED)}
    worker.kept = finished - {"asleep"}, failed - {"asleep"}
    worker.acks = [ack for ack in acks if ack.job_id < ours]


def main(folder: Path, fault: str) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(scheduler, "FakeExecutor", SleepingExecutor)
        monkeypatch.setattr("epochkv_connector.weights.watch.SHARE", 1)
        monkeypatch.setattr("epochkv_connector.weights.watch.PAUSE_SECONDS", 0.0)  # an idle engine looks whenever it may
        if fault == "no drain":
            monkeypatch.setattr(rank_calls.Held, "settle_for_sleep", lambda held: 0)
        if fault == "past the executor":
            monkeypatch.setattr(rank_calls, "settle_for_sleep", lambda worker: 0)
        if fault == "looks":
            monkeypatch.setattr(rank_calls, "_notice_sleep", lambda worker, held: None)
        if fault == "forgets":
            monkeypatch.setattr(WeightChanges, "lost_blocks", lambda changes: None)
        copies, number = SlowCopies(monkeypatch), 0
        for hooks in (False, True):
            for moves in (False, True):
                rig = SleepingRig(folder / f"rig{number}", monkeypatch=monkeypatch, num_blocks=NUM_BLOCKS)
                rig.executor.worker.hooks, rig.executor.worker.moves = hooks, moves
                for level in (1, 2):
                    for order in ORDERS:
                        sleep_and_wake(rig, copies, number, level, order)
                        number += 1
                        print(f"slept {number} times", flush=True)
                rig.check_clean()
                rig.close()


TIMES = 24
"""With vLLM's hooks and without, in place and elsewhere, two levels, three orders of tags."""


def sleep(folder: Path, fault: str) -> tuple[int, int, str]:
    """(exit status, how often it has slept, what it said)."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.scheduler.test_sleep", str(folder), fault], capture_output=True, text=True, timeout=300, check=False
    )
    return ended.returncode, ended.stdout.count("slept"), ended.stderr[-3000:]


@pytest.mark.parametrize("how", ["by the executor", "past the executor"])
def test_no_copy_and_no_digest_touches_unmapped_memory_and_no_name_stays_of_what_was_there(tmp_path: Path, how: str) -> None:
    status, slept, said = sleep(tmp_path, how)
    assert (status, slept) == (0, TIMES), said


@pytest.mark.parametrize("fault", ["no drain", "looks"])
def test_without_our_rules_the_engine_dies(tmp_path: Path, fault: str) -> None:
    status, slept, said = sleep(tmp_path, fault)
    assert status == -signal.SIGSEGV or "in check_asleep" in said, said  # on a busy machine a copy may begin so late that it was not ended
    assert slept < TIMES


def test_without_our_rules_names_stay_of_what_is_gone(tmp_path: Path) -> None:
    assert "KV of other tokens" in sleep(tmp_path, "forgets")[2]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
