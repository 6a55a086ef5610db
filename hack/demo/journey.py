"""The main job on a running cluster: share KV between two engines, push new weights and prove that they arrived, raise `resetEpoch`.

The demo shows it, `tests/e2e` asserts it: both run this code. Every answer is compared with the answer of an engine that has
no cache at all and belongs to no pool.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from hack.demo.claims import Claims
from hack.demo.kube import DemoError, Json, Kube, condition
from hack.engine_api import Answer, EngineApi
from hack.waiting import eventually

NAMESPACE, POOL, ENGINE, REFERENCE, MODEL = "epochkv-demo", "policy", "rollout", "reference", "tiny"
BASE_WEIGHTS, NEW_WEIGHTS = "/models/base", "/models/new"
VOCABULARY = 512
PROMPT_TOKENS = 1000
# vLLM on CPU makes blocks of 128 tokens; only whole blocks are cached: 7 of them, 896 tokens.
BLOCKS = PROMPT_TOKENS // 128
CACHED = BLOCKS * 128
ANSWER_TOKENS = 16
MAX_REPEATS = 2
MISSES: Final[Mapping[str, tuple[Sequence[str], Mapping[str, str]]]] = {
    "a late answer of the store": (("vllm:epochkv_store_queries_total",), {"event": "late"}),
    "a failed transfer": (("vllm:epochkv_loads_failed_total", "vllm:epochkv_loads_failed_before_send_total"), {}),
}
"""The connector's own counts, by what each means."""

Prompt = tuple[int, ...]
T = TypeVar("T")


def make_prompts(seed: int, count: int) -> list[Prompt]:
    """Random prompts of 1000 token ids; special ids (0, 1) are left out."""
    rng = random.Random(seed)
    return [tuple(rng.randrange(2, VOCABULARY) for _ in range(PROMPT_TOKENS)) for _ in range(count)]


@dataclass(frozen=True)
class Bump:
    """One reset as the demo's own watch of the pool saw it."""

    epoch: int
    milliseconds: float


class EpochWatch:
    """Notes when a watch first shows each asked and each published epoch of the pool."""

    def __init__(self, kube: Kube, namespace: str, pool: str, seconds: float) -> None:
        self.asked: dict[int, float] = {}
        self.published: dict[int, float] = {}
        self.error: Exception | None = None
        path = f"/apis/epochkv.io/v1alpha1/namespaces/{namespace}/kvcachepools?fieldSelector=metadata.name%3D{pool}"
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(kube, path, seconds), daemon=True, name="epoch-watch")
        self._thread.start()
        self._started.wait(10.0)

    def _run(self, kube: Kube, path: str, seconds: float) -> None:
        try:
            for obj in kube.watch(path, seconds):
                now = time.perf_counter()
                self.asked.setdefault(int(obj["spec"].get("resetEpoch") or 0), now)
                self.published.setdefault(int((obj.get("status") or {}).get("epoch") or 0), now)
                self._started.set()
        except (OSError, DemoError) as error:
            self.error = error
        finally:
            self._started.set()

    def milliseconds(self, epoch: int, seconds: float) -> float:
        """From the accepted patch to the published epoch."""
        eventually(
            lambda: epoch in self.published and epoch in self.asked,
            lambda: f"the watch did not show epoch {epoch} published ({self.error or 'no error'})",
            seconds,
            pause=0.02,
        )
        return (self.published[epoch] - self.asked[epoch]) * 1e3


@dataclass(frozen=True)
class Read:
    """What an engine answered that should have loaded a prompt's KV.

    `right`: the answer of an engine without a cache. `through_l2`: tokens of the prompt. `misses`: what the connector counted
    meanwhile; looked up only where tokens are missing.
    """

    answer: Answer
    right: tuple[int, ...]
    through_l2: int
    misses: tuple[str, ...]

    @classmethod
    def of(cls, engine: EngineApi, prompt: Prompt, right: tuple[int, ...]) -> Read:
        """Ask the engine."""
        misses, external = _misses(engine), _external(engine)
        answer = engine.complete(prompt, ANSWER_TOKENS)
        through_l2 = _external(engine) - external
        if answer.cached == through_l2 == CACHED:
            return cls(answer, right, through_l2, ())
        engine.report_metrics([2, 3])
        return cls(answer, right, through_l2, tuple(what for what, count in _misses(engine).items() if count > misses[what]))


@dataclass
class Journey:
    """State of one run. `note` receives one line per thing done."""

    kube: Kube
    note: Callable[[str], None]
    seed: int
    claims: Claims = field(default_factory=Claims)
    bumps: list[Bump] = field(default_factory=list)
    engines: list[EngineApi] = field(default_factory=list)
    reference: EngineApi | None = None
    prompts: list[Prompt] = field(default_factory=list)
    old_answers: list[tuple[int, ...]] = field(default_factory=list)
    new_answers: list[tuple[int, ...]] = field(default_factory=list)
    drawn: int = 0
    """Prompts drawn in place of those that a busy machine made a miss of."""

    # -- the steps -----------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Find the engines; when an earlier run has used them, give them the base weights and a fresh epoch."""
        self.prompts = make_prompts(self.seed, 4)
        engines = self.kube.engines(NAMESPACE, ENGINE, MODEL)
        if len(engines) < 2:
            raise DemoError(f"{len(engines)} Ready pods of InferenceEngine {NAMESPACE}/{ENGINE}, 2 are needed")
        references = self.kube.engines(NAMESPACE, REFERENCE, MODEL)
        if not references:
            raise DemoError(f"no Ready pod of InferenceEngine {NAMESPACE}/{REFERENCE}")
        self.engines, self.reference = list(engines[:2]), references[0]
        used = any(engine.metric("vllm:prompt_tokens_total") for engine in [*engines, self.reference])
        if self.epoch() or used:
            self.note("an earlier run was here: base weights again, and a fresh epoch")
            self._load(BASE_WEIGHTS)
            self.bump()

    def share(self) -> None:
        """Prompts to A, the same to B: B takes them from L2 and answers like an engine without a cache."""
        first, second = self.engines
        self.old_answers = self._reference_answers(self.prompts)
        self._reuse("old weights", self.prompts, first, second, self.old_answers)

    def push(self) -> None:
        """New weights into every replica, as any trainer would: nothing else is called, no epoch is raised."""
        epoch, before = self.epoch(), self._weights(len(self.engines))
        self.note("new weights into both replicas and into the reference")
        self._load(NEW_WEIGHTS)
        after = self._weights(len(self.engines), other_than=before)
        for line in self.kube.kubectl("-n", NAMESPACE, "get", "kvp", POOL).splitlines():
            self.note(line)
        pushed = after.endswith(" 2/2") and after != before
        self.claims.check("column WEIGHTS after the push", pushed, "another id, 2/2", f"{before}, then {after}")
        self.claims.equal("condition WeightsConverged", condition(self.pool(), "WeightsConverged").get("status"), "True")
        self.claims.equal("status.epoch after the push", self.epoch(), epoch)

    def after(self) -> None:
        """The same prompts: nothing of the old weights; and sharing works at once."""
        self.new_answers = self._reference_answers(self.prompts)
        changed = sum(new != old for new, old in zip(self.new_answers, self.old_answers, strict=True))
        self.claims.equal("answers that the new weights change (without a cache)", f"{changed} of 4", "4 of 4")
        self._reuse_both_ways("new weights")

    def reset(self) -> Bump:
        """Forget everything, proved: nothing that was computed before is found on any tier."""
        weights = self._weights(len(self.engines))
        bump = self.bump()
        self.claims.equal("status.epoch after the bump", self.epoch(), bump.epoch)
        self.claims.equal("engines at that epoch", self._converged(), len(self.engines))
        self.claims.equal("condition EpochConverged", condition(self.pool(), "EpochConverged").get("status"), "True")
        self.claims.equal("column WEIGHTS after the bump", self._weights(len(self.engines)), weights)
        self._reuse_both_ways("new epoch")
        return bump

    def bump(self) -> Bump:
        """Raise the epoch by one with kubectl, wait with kubectl, and measure with a watch of our own."""
        pool = self.pool()
        epoch = max(int(pool["spec"].get("resetEpoch") or 0), int((pool.get("status") or {}).get("targetEpoch") or 0)) + 1
        watch = EpochWatch(self.kube, NAMESPACE, POOL, 120.0)
        patch = f'{{"spec":{{"resetEpoch":{epoch}}}}}'
        self.note(f"kubectl patch kvp {POOL} --type=merge -p '{patch}'")
        self.kube.kubectl("-n", NAMESPACE, "patch", "kvp", POOL, "--type=merge", "-p", patch)
        wait = f"--for=jsonpath={{.status.epoch}}={epoch}"
        self.kube.kubectl("-n", NAMESPACE, "wait", f"kvp/{POOL}", wait, "--timeout=60s")
        bump = Bump(epoch, watch.milliseconds(epoch, 10.0))
        self.note(f"epoch {epoch} published {bump.milliseconds:.0f} ms after the patch")
        self.bumps.append(bump)
        self.kube.kubectl("-n", NAMESPACE, "wait", f"ie/{ENGINE}", "--for=condition=EpochCurrent", "--timeout=60s")
        return bump

    # -- pieces --------------------------------------------------------------------------------------------------------

    def pool(self) -> Json:
        """The pool as it is now."""
        return self.kube.get(f"/apis/epochkv.io/v1alpha1/namespaces/{NAMESPACE}/kvcachepools/{POOL}")

    def epoch(self) -> int:
        return int((self.pool().get("status") or {}).get("epoch") or 0)

    def stored_blocks(self, epoch: int) -> int:
        """Objects of this epoch in the store, by their names, as the Mooncake master lists them."""
        masters = self.kube.pods(NAMESPACE, f"epochkv.io/pool={POOL},app.kubernetes.io/component=master")
        if not masters:
            raise DemoError(f"pool {NAMESPACE}/{POOL} has no master pod")
        status, body = self.kube.pod_http(NAMESPACE, masters[0]["metadata"]["name"], 9003, "GET", "/get_all_keys")
        if status != 200:
            raise DemoError(f"the master's /get_all_keys: HTTP {status}")
        return sum(f"/e{epoch}/" in key for key in body.decode().split())

    def _converged(self) -> int:
        """Engines at the target in the status, which follows a moment after the epoch."""
        count = len(self.engines)
        return self._settled(lambda status: int((status.get("engines") or {}).get("converged", 0)), lambda n: n == count, 10.0)

    def _weights(self, engines: int, other_than: str = "") -> str:
        """The column WEIGHTS once all engines hold the same, other weights, or as it is when the time is over."""

        def all_hold(column: str) -> bool:
            return column.endswith(f" {engines}/{engines}") and column != other_than

        return self._settled(lambda status: str(status.get("weightsSummary", "")), all_hold, 30.0)

    def _settled(self, read: Callable[[Json], T], done: Callable[[T], bool], seconds: float) -> T:
        deadline = time.monotonic() + seconds
        while True:
            seen = read(self.pool().get("status") or {})
            if done(seen) or time.monotonic() > deadline:
                return seen
            time.sleep(0.1)

    def _load(self, weights: str) -> None:
        assert self.reference is not None
        for engine in (*self.engines, self.reference):
            engine.reload_weights(weights)

    def _reference_answers(self, prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
        assert self.reference is not None
        answers = [self.reference.complete(prompt, ANSWER_TOKENS) for prompt in prompts]
        self.claims.equal("tokens that the reference took from a cache", sum(answer.cached for answer in answers), 0)
        return [answer.tokens for answer in answers]

    def _reuse_both_ways(self, label: str) -> None:
        """Each engine is asked first for two of the prompts, so neither may find anything that was there before on any tier."""
        first, second = self.engines
        self._reuse(f"{label}, A first", self.prompts[:2], first, second, self.new_answers[:2])
        self._reuse(f"{label}, B first", self.prompts[2:], second, first, self.new_answers[2:])

    def _reuse(self, label: str, prompts: Sequence[Prompt], writer: EngineApi, reader: EngineApi, expected: list[tuple[int, ...]]) -> None:
        """The writer computes and saves, the reader loads; both must answer as expected."""
        count = len(prompts)
        epoch = self.epoch()
        before = self.stored_blocks(epoch)
        hits = _external(writer)
        self.note(f"{label}: {count} prompts of {PROMPT_TOKENS} tokens to {writer.name}")
        written = [writer.complete(prompt, ANSWER_TOKENS) for prompt in prompts]
        self.claims.equal(f"{label}: cached tokens on the first engine", [answer.cached for answer in written], [0] * count)
        self.claims.equal(f"{label}: tokens it took from L2", _external(writer) - hits, 0)
        self._wait_stored(epoch, before + BLOCKS * count)
        self.note(f"{label}: the same prompts to {reader.name}")
        reads = [self._read(label, epoch, writer, reader, prompt, right) for prompt, right in zip(prompts, expected, strict=True)]
        self.claims.equal(f"{label}: cached tokens on the other engine", [read.answer.cached for read in reads], [CACHED] * count)
        self.claims.equal(f"{label}: of these through L2", sum(read.through_l2 for read in reads), CACHED * count)
        self._same(f"{label}: answers of the first engine", written, expected)
        self._same(f"{label}: answers of the other engine", [read.answer for read in reads], [read.right for read in reads])

    def _read(self, label: str, epoch: int, writer: EngineApi, reader: EngineApi, prompt: Prompt, right: tuple[int, ...]) -> Read:
        """The reader's answer. A miss that the connector counts (a busy machine) is repeated with another prompt, at most twice."""
        for _ in range(MAX_REPEATS):
            read = Read.of(reader, prompt, right)
            if not read.misses:
                return read
            self._same(f"{label}: an answer after a miss ({' and '.join(read.misses)})", [read.answer], [right])
            self.note(f"{label}: {' and '.join(read.misses)} on this busy machine, so a miss; once more with another prompt")
            self.drawn += 1
            prompt, right = self._once_more(epoch, writer, self.seed * 1000 + self.drawn)
        return Read.of(reader, prompt, right)

    def _once_more(self, epoch: int, writer: EngineApi, seed: int) -> tuple[Prompt, tuple[int, ...]]:
        """A fresh prompt that the writer has saved, and its right answer."""
        assert self.reference is not None
        (prompt,) = make_prompts(seed, 1)
        before = self.stored_blocks(epoch)
        writer.complete(prompt, ANSWER_TOKENS)
        self._wait_stored(epoch, before + BLOCKS)
        return prompt, self.reference.complete(prompt, ANSWER_TOKENS).tokens

    def _wait_stored(self, epoch: int, blocks: int) -> None:
        eventually(
            lambda: self.stored_blocks(epoch) >= blocks,
            lambda: f"{self.stored_blocks(epoch)} of {blocks} blocks of epoch {epoch} are in the store",
            60.0,
            0.5,
        )

    def _same(self, what: str, answers: Sequence[Answer], expected: Sequence[tuple[int, ...]]) -> None:
        wrong = sum(answer.tokens != right for answer, right in zip(answers, expected, strict=True))
        self.claims.check(what, wrong == 0, "as without a cache", "as without a cache" if not wrong else f"{wrong} differ")


def _external(engine: EngineApi) -> int:
    """Prompt tokens that this engine has taken from another engine's KV so far."""
    return int(engine.metric("vllm:prompt_tokens_by_source_total", source="external_kv_transfer"))


def _misses(engine: EngineApi) -> dict[str, int]:
    """What this engine's connector has counted so far that makes a miss of a block that the store holds."""
    return {what: int(sum(engine.metric(name, **labels) for name in names)) for what, (names, labels) in MISSES.items()}
