"""Adoptions as fast as they can come, while requests are hashed, scheduled, preempted, loaded and saved: every name is right.

Three threads as in an engine core: the input thread makes and hashes requests, the scheduler thread steps, the agent thread
adopts. The oracle labels every computed position with the pin its request had at that moment, and knows from vLLM's own hash
function what a block of these tokens is called under that pin; what lies under any name is compared with it: in vLLM's prefix
cache, in L1, and in L2. It also holds that no request ever sees KV that was computed under another pin than its own,
and that nobody is admitted under a root that was left before.
"""

import queue
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request

from epochkv_connector.engine.blocks import holds_blocks
from tests.scheduler.rigs import MakeRig, release
from tests.support.scheduler import BLOCK, Rig, SharedStore, prompt
from tests.support.scheduler_oracle import Oracle
from tests.support.scheduler_worker import Cell, Content
from tests.support.store import parse_key

ADOPTIONS = 500
DEADLINE_SECONDS = 60.0


class PinnedOracle(Oracle):
    """Its labels are pins, and each computed block has one right name."""

    def __init__(self, rig: Rig) -> None:
        super().__init__(rig)
        self.right_names: dict[Cell, bytes] = {}  # last position of a complete block -> its name

    def label(self, request: Request) -> str:
        return str(self.rig.pins.pin_of(request).root.hex())

    def admitted_label(self, request: Request) -> str:
        return self.label(request)

    def check(self, request: Request, start: int, admitted: bool) -> None:
        super().check(request, start, True)  # a pin never changes while blocks are held: true in every step

    def compute(self, request: Request, start: int, end: int, num_drafts: int = 0, num_taken: int = 0) -> None:
        super().compute(request, start, end, num_drafts, num_taken)
        digests, label = self.digests(request), self.label(request)
        parent = bytes.fromhex(label)
        for first in range(0, end - end % BLOCK, BLOCK):
            cell = label, digests[first + BLOCK - 1]
            if cell not in self.right_names:
                tokens = request.all_token_ids[first : first + BLOCK]
                self.right_names[cell] = kv_cache_utils.hash_block_tokens(sha256, parent, tokens)
            parent = self.right_names[cell]


class PinnedRig(Rig):
    """After each step, whatever can be found by a name is compared with the right name."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, oracle=PinnedOracle, **kwargs)
        assert isinstance(self.oracle, PinnedOracle)
        self.right_names = self.oracle.right_names
        self.roots: dict[int, str] = {}  # epoch -> label of its shared root
        self.inside_step = 0  # number of the step that is inside schedule(), or 0
        self.checked: set[tuple[str, Any, bytes]] = set()
        self.wrong: list[str] = []
        self.num_steps = 0

    def step(self) -> Any:
        self.num_steps += 1
        held = {request.request_id for request in self.scheduler.requests.values() if holds_blocks(request)}
        generation = self.pins.root.snapshot.generation
        self.inside_step = self.num_steps
        try:
            output = self.scheduler.schedule()
        finally:
            self.inside_step = 0
        admitted = {new.req_id for new in output.scheduled_new_reqs} | output.scheduled_cached_reqs.resumed_req_ids
        self._check_admitted(admitted - held, generation, "scheduled")
        self.update(output)
        self.check_names()
        return output

    def update(self, output: Any) -> None:
        known, generation = set(self.scheduler.finished_recving_kv_req_ids), self.pins.root.snapshot.generation
        super().update(output)
        recorded = self.scheduler.finished_recving_kv_req_ids - self.scheduler.failed_recving_kv_req_ids - known
        self._check_admitted(recorded, generation, "loaded")

    def _check_admitted(self, request_ids: Iterable[str], generation: int, how: str) -> None:
        """Nobody is let in under a root that had been left before the step, or the recording of results, began."""
        for request_id in request_ids:
            if self.pins.pin_of(self.scheduler.requests[request_id]).generation < generation:
                self.wrong.append(f"{request_id} was {how} under a root that was left before")

    def check_names(self) -> None:
        """Everything that can be found by a name, in every tier."""
        for block in self.block_pool.blocks:
            if block.block_hash is not None:
                self._compare("GPU", block.block_id, kv_cache_utils.get_block_hash(block.block_hash), self.gpu.get(block.block_id))
        for (name, slot), worker in ((item, worker) for worker in self.workers for item in self.tiers.state.index._maps[0].items()):
            self._compare("L1", slot, name, worker.slots.get(slot))

    def _compare(self, tier: str, place: Any, name: bytes, content: Content | None) -> None:
        if (tier, place, name) in self.checked and tier == "L2":
            return
        self.checked.add((tier, place, name))
        if content is None or None in content or len({cell[0] for cell in content if cell}) != 1:
            self.wrong.append(f"{tier} {place}: {name.hex()} names a block that was not computed under one pin")
        elif content[-1] is None or self.right_names.get(content[-1]) != name:
            self.wrong.append(f"{tier} {place}: {name.hex()} names a block of another pin or other tokens")

    def check_store(self) -> None:
        """L2 names carry their epoch, too."""
        assert self.store is not None
        for key, content in self.store.objects.items():
            parsed = parse_key(key)
            self._compare("L2", key, parsed.block_hash, content)
            if content[-1] is None or content[-1][0] != self.roots.get(parsed.epoch):
                self.wrong.append(f"L2 {key}: computed under another root than its epoch's")


class Agent:
    """Adopts in bursts and pauses; some of it on purpose while the scheduler is inside `schedule()`."""

    def __init__(self, rig: PinnedRig, source: random.Random) -> None:
        self.rig, self.source = rig, source
        self.epoch = 0
        self.count: Counter[str] = Counter()
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def adopt(self) -> None:
        inside = self.rig.inside_step
        self.rig.pins.root.adopt(self.epoch)
        snapshot = self.rig.pins.root.snapshot
        if snapshot.shared:
            self.rig.roots[self.epoch] = snapshot.root.hex()
        self.count["adoptions"] += 1
        self.count["adoptions inside schedule()"] += bool(inside) and self.rig.inside_step == inside

    def _run(self) -> None:
        while not self.stop.is_set():
            self._wait()
            for _ in range(self.source.choice([1, 1, 1, 2, 5])):
                self.epoch += 1
                self.adopt()

    def _wait(self) -> None:
        """A few steps, perhaps until a load is under way, and then perhaps the inside of a step."""
        until = self.rig.num_steps + self.source.choice([1, 1, 1, 1, 2, 2, 3, 25])
        aim, hunts = self.source.random() < 0.6, self.source.random() < 0.5
        while not self.stop.is_set() and self.rig.num_steps < until and not (hunts and self.rig.workers[0].loads):
            time.sleep(0.0002)
        deadline = time.monotonic() + 0.05
        while aim and not self.rig.inside_step and time.monotonic() < deadline:
            time.sleep(0)


def requests(rig: PinnedRig, source: random.Random, ready: queue.Queue[Request], stop: threading.Event) -> None:
    """The input thread: hashes with the global of the moment."""
    families = [prompt(seed, 6 * BLOCK) for seed in range(2)]
    while not stop.is_set():
        kept = source.choice([BLOCK - 5, 2 * BLOCK, 5 * BLOCK + 7, 6 * BLOCK])
        tokens = [*source.choice(families)[:kept], source.randrange(3, 6)]
        skips = True if source.random() < 0.1 else None
        made = rig.request(tokens, max_tokens=source.choice([1, 2 * BLOCK, 3 * BLOCK]), skip_reading_prefix_cache=skips)
        while not stop.is_set():
            try:
                ready.put(made, timeout=0.05)
                break
            except queue.Full:
                continue


def reached(rig: PinnedRig, agent: Agent, count: Counter[str]) -> dict[str, tuple[float, float]]:
    """What happened so far, and how much of it there has to be."""
    stats = rig.tiers.stats()
    return {
        "adoptions": (agent.count["adoptions"], ADOPTIONS),
        "adoptions inside schedule()": (agent.count["adoptions inside schedule()"], 50),
        "preemptions": (count["preemptions"], 50),
        "steps with requests on an old epoch": (count["old_epoch_requests"], 100),
        "requests re-hashed": (rig.pins.counters["rehashed_requests"], 100),
        "loads": (stats["loads_done"], 20),
        "loads invalidated": (rig.side.counters["invalidated_loads"], 3),
        "blocks put": (len(rig.store.objects), 50),
    }


def test_every_name_is_right_under_fast_adoption(make_rig: MakeRig, capsys: pytest.CaptureFixture[str]) -> None:
    store, source = SharedStore(), random.Random(5)
    rig: PinnedRig = make_rig(
        kind=PinnedRig, store=store, num_blocks=24, l1_bytes=60 * 2304, max_batched_tokens=64, max_num_seqs=6, extra={"lookup_wait_ms": 5.0}
    )
    agent, ready, count = Agent(rig, source), queue.Queue[Request](maxsize=3), Counter[str]()
    agent.adopt()
    maker = threading.Thread(target=requests, args=(rig, random.Random(6), ready, agent.stop), daemon=True)
    preempt = rig.scheduler._preempt_request

    def counted(request: Request, *args: Any, **kwargs: Any) -> Any:
        count["preemptions"] += 1
        return preempt(request, *args, **kwargs)

    rig.scheduler._preempt_request = counted
    agent.thread.start()
    maker.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)  # not every 5 ms, but often enough that threads meet inside our few microseconds
    deadline = time.monotonic() + DEADLINE_SECONDS
    try:
        while not rig.wrong and any(x < goal for x, goal in reached(rig, agent, count).values()) and time.monotonic() < deadline:
            while len(rig.scheduler.requests) < 9 and not ready.empty():
                rig.scheduler.add_request(ready.get())
            for worker in rig.workers:
                worker.hold_loads = source.random() < 0.5
            rig.step()
            count["old_epoch_requests"] += rig.pins.old_epoch_requests() > 0
    finally:
        sys.setswitchinterval(interval)
        agent.stop.set()
        agent.thread.join()
        maker.join()
    release(rig)
    rig.run(5000)
    rig.check_store()
    told = {name: int(found) for name, (found, _) in reached(rig, agent, count).items()}
    with capsys.disabled():
        print(f"\n{len(rig.checked)} names checked, {len(rig.wrong)} wrong; {told}; steps: {rig.num_steps}")
    assert rig.wrong == []
    assert len(rig.checked) > 1000
    assert {name: pair for name, pair in reached(rig, agent, count).items() if pair[0] < pair[1]} == {}
