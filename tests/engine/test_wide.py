"""Two domains of two data-parallel ranks that hold a model's experts together, one Mooncake, a hub.

The ranks of A have a server each, which a push can reach alone; those of B share one. What a request with a salt answers, which finds
nothing of others, is right.
"""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from epochkv_fence import client
from epochkv_fence.client.stamps import ASK, Made, stamps
from epochkv_fence.protocol.messages import UNKNOWN_WEIGHTS as UNKNOWN
from hack import models
from hack.loopback import free_port
from hack.standalone import cpu_collectives
from hack.standalone.engine import Engine
from hack.standalone.mooncake import Mooncake
from hack.standalone.pool import Pool
from hack.waiting import eventually
from tests.engine.conftest import CACHED, L1_BYTES, PATIENT, PATIENT_ENVIRON, Prompts, check, settled_keys
from tests.engine.names_lab import WRITER, Orders, Stream, Streams, may_be_slow

pytestmark = pytest.mark.slow  # four engine cores, whose workers vLLM spawns
LEASE_SECONDS = 6.0
IDLE = 0.8
"""Seconds after which a rank asks the others anew."""


@dataclass
class Wide:
    """Both domains.

    Attributes:
        a0, a1, b0, b1: their ranks.
        base, new: folders of weights. Every rank holds `base`, as a reload leaves it: vLLM's CPU backend ends elsewhere than a start.
    """

    pool: Pool
    mooncake: Mooncake
    folder: Path
    base: Path
    new: Path
    a0: Engine
    a1: Engine
    b0: Engine
    b1: Engine

    def push(self, path: Path, *ranks: Engine) -> None:
        for rank in ranks:
            rank.reload_weights(path)

    def converged(self, groups: list[int]) -> None:
        """The pool says that so many ranks each hold the same."""
        eventually(
            lambda: [group.engines for group in self.pool.snapshot().weights] == groups, lambda: f"{self.pool.snapshot().weights}", 60
        )

    def restore(self, prompts: Prompts) -> None:
        """Every rank holds `base`. Where that had ended, the next epoch has come, which a rank asks for with its first request."""
        self.push(self.base, self.a0, self.a1, self.b0)
        self.converged([4])
        for rank in (self.a0, self.a1, self.b0, self.b1):
            rank.complete(prompts(), 2)
        eventually(lambda: self.pool.snapshot().converged, "the epoch is published", 30)

    def ask(self, rank: Engine, prompt: list[int], cached: int | None = None) -> None:
        """The answer is right, and so much of the prompt was found; None: any."""
        answer, right = rank.complete(prompt), rank.complete(prompt, cache_salt=f"{time.time_ns()}")
        assert right.cached == 0
        check(answer, answer.cached if cached is None else cached, right.tokens)

    def made(self, rank: Engine, prompt: list[int]) -> tuple[Made, ...]:
        """What the stamp of its answer says."""
        (stamp,) = stamps({"kv_transfer_params": rank.complete(prompt, transfer=ASK).transfer})
        assert stamp is not None
        return stamp.made

    def save(self, rank: Engine, prompt: list[int]) -> None:
        """The prompt is new, and in the store afterwards."""
        before = settled_keys(self.mooncake)
        self.ask(rank, prompt, 0)
        eventually(lambda: len(settled_keys(self.mooncake) - before) >= CACHED // 128, "in the store", 30)


@pytest.fixture(scope="module")
def wide(mooncake: Mooncake, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wide]:
    folder = tmp_path_factory.mktemp("wide")
    base, new = (models.make(folder / name, seed, models.Shape(experts=4)) for name, seed in (("base", 1), ("new", 2)))
    environ = {**cpu_collectives.install(folder / "plugin"), **PATIENT_ENVIRON}
    with ExitStack() as stack:
        pool = stack.enter_context(Pool(folder, lease_seconds=LEASE_SECONDS))
        connector = pool.connector(L1_BYTES, mooncake.address, **PATIENT)
        group = ("--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(free_port()))

        def start(name: str, *args: str) -> Engine:
            all_args = ("--data-parallel-size", "2", *args, *WRITER)
            engine = Engine(name, base, folder, connector, args=all_args, environ={**environ, "EPOCHKV_ENGINE_NAME": name[0]})
            stack.callback(engine.end)  # also where another one does not become ready
            return engine

        started = [start(f"a{rank}", "--data-parallel-rank", str(rank), *group) for rank in range(2)] + [start("b")]
        a0, a1, b = (engine.wait_ready(600.0) for engine in started)
        for engine in (a0, b):  # the other ranks wait for theirs
            may_be_slow(engine, 0.02)
        yield Wide(pool, mooncake, folder, base, new, a0, a1, b.of_rank(0), b.of_rank(1))


@pytest.fixture(autouse=True)
def restored(wide: Wide, prompts: Prompts) -> None:
    wide.restore(prompts)


def test_what_one_rank_has_saved_every_rank_of_equal_domains_finds(wide: Wide, prompts: Prompts) -> None:
    for saver in (wide.a0, wide.b1):
        prompt = prompts()
        wide.save(saver, prompt)
        for rank in (wide.a0, wide.a1, wide.b0, wide.b1):
            wide.ask(rank, prompt, CACHED)


def test_a_push_that_reaches_one_rank_hides_everything_from_the_other_one_too(wide: Wide, prompts: Prompts) -> None:
    prompt = prompts()
    wide.save(wide.a0, prompt)
    target = wide.pool.snapshot().target
    wide.push(wide.new, wide.a1)  # nobody steps
    time.sleep(IDLE)
    for rank in (wide.a0, wide.a1):
        wide.ask(rank, prompt, 0)
    wide.converged([2, 1, 1])
    wide.ask(wide.b0, prompt, CACHED)
    wide.push(wide.new, wide.a0)
    wide.ask(wide.a0, prompt, 0)
    wide.push(wide.base, wide.a0, wide.a1)
    wide.converged([4])
    wide.ask(wide.a1, prompt, CACHED)
    assert wide.pool.snapshot().target == target, "nobody else had to forget anything"


def test_blocks_of_a_step_during_which_one_rank_was_pushed_to_are_found_by_nobody(wide: Wide, prompts: Prompts) -> None:
    stream = Stream(wide.a0, prompts(300))
    eventually(lambda: len(stream.tokens) > 10, "it runs")
    wide.push(wide.new, wide.a1)
    so_far = len(stream.tokens)
    eventually(lambda: len(stream.tokens) > so_far + 300, "it goes on", 120)
    stream.end()
    assert wide.a0.metric("vllm:epochkv_weights_events_total", what="mixed") >= 1
    wide.ask(wide.a0, stream.whole, 0)
    wide.push(wide.base, wide.a1)
    wide.converged([4])
    for allowed, rank in ((300 + so_far, wide.a0), (CACHED, wide.a1), (CACHED, wide.b0)):  # the first one saves what it computes anew
        answer, right = rank.complete(stream.whole), rank.complete(stream.whole, cache_salt=f"{time.time_ns()}")
        assert answer.cached <= allowed, "a wrong answer: from blocks that are not to be found"
        assert answer.tokens == right.tokens, "a wrong answer"


def test_each_token_says_what_all_ranks_held(wide: Wide, prompts: Prompts) -> None:
    """Of A, one rank has the new weights well before the other; both of B have them with one call. Requests run meanwhile."""
    (base,) = (view.id for view in wide.pool.snapshot().weights)
    with Streams(wide.a0, [prompts(300)], 500) as a, Streams(wide.b0, [prompts(300)], 500) as b:
        a.arrive(10)
        b.arrive(10)
        wide.push(wide.new, wide.a1)
        wide.converged([2, 1, 1])
        half = {view.display_name: (view.weights or b"").hex() for view in wide.pool.snapshot().engines}
        assert [wide.made(rank, prompts()) for rank in (wide.a0, wide.a1)] == [(Made(0, half["a"]),), (Made(0, half["a/1"]),)]
        a.move_on(10)
        began = time.monotonic()
        wide.push(wide.new, wide.a0, wide.b0)
        a.wait()
        b.wait()
    with client.Pool.connect(wide.pool.connection()) as trainer:
        (new,) = trainer.wait_weights(timeout_s=60, label="step-1", other_than={base}).ids
    ranks = (wide.a0, wide.a1, wide.b0, wide.b1)
    eventually(lambda: {wide.made(rank, prompts()) for rank in ranks} == {(Made(0, new, "step-1"),)}, "all say the label", 30)
    wide.restore(prompts)
    for stream, between in ((a.all[0], {UNKNOWN, half["a"]}), (b.all[0], {UNKNOWN})):
        assert stream.stamp is not None
        first, *made, last = stream.stamp.made
        assert (first.from_token, first.weights, last.weights) == (0, base, new)
        assert {one.weights for one in made} >= between
        assert not {one.weights for one in made} & {base, new}
        assert stream.times[last.from_token] >= began
        right = wide.b1.complete(stream.prompt, made[0].from_token, cache_salt=f"{time.time_ns()}")
        assert tuple(stream.tokens[: made[0].from_token]) == right.tokens, "these weights do not make these tokens"


@pytest.mark.parametrize("seconds", [1.0, 2 * LEASE_SECONDS], ids=["short", "past-the-lease"])
def test_a_rank_that_stands_still_in_the_middle_of_a_push_makes_no_answer_wrong(wide: Wide, prompts: Prompts, seconds: float) -> None:
    prompt = prompts()
    wide.save(wide.a1, prompt)
    with ThreadPoolExecutor(2) as pool:
        for wait, path in ((0.02, wide.new), (0.1, wide.base), (0.3, wide.new)):
            push = pool.submit(wide.push, path, wide.a1)
            time.sleep(wait)
            wide.a1.process.freeze()
            asked = pool.submit(wide.a0.complete, prompt)  # its pass waits for the other rank
            try:
                time.sleep(seconds)
                wide.ask(wide.b0, prompt)
            finally:
                wide.a1.process.thaw()
            push.result(60)
            asked.result(60)
            for rank in (wide.a0, wide.a1, wide.b1):
                wide.ask(rank, prompt)
    wide.restore(prompts)
    wide.save(wide.a1, prompt := prompts())
    for rank in (wide.a0, wide.b0):
        wide.ask(rank, prompt, CACHED)


def test_one_rank_written_past_vllm_is_noticed_by_the_other_one(wide: Wide, prompts: Prompts) -> None:
    order, prompt = Orders(wide.folder / "orders", wide.a1), prompts()
    time.sleep(IDLE)  # the call that began the orders is looked at
    wide.save(wide.a0, prompt)
    order("model.layers.0.mlp.experts.routed_experts.w2_weight", -1.0)
    time.sleep(IDLE)
    wide.ask(wide.a0, prompt, 0)
    wide.ask(wide.b0, prompt, CACHED)
