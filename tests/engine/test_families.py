"""Every family of models on real engines: what the GPU's cache, L1 and L2 give back, against an engine that caches nothing.

Each family has three engines. The reference caches nothing. The saver has L1 and L2: it computes a prompt in chunks, finds it in its
own cache, and finds it in L1 after everything in its blocks was overwritten. The reader has L2 alone, and never saw the prompt.
Before that counts, each family proves that a wrong block of any of its KV cache groups changes the answer.
`make test` runs those that are `sliced`, `make test-all` every one. Some families are shown with two ranks, or scheduled ahead, too.
"""

import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from hack.standalone.mooncake import Mooncake
from hack.standalone.pool import Pool
from tests.engine import family_child, family_models
from tests.engine.conftest import PATIENT, settled_keys
from tests.engine.families import FAMILIES, IMAGE_TOKEN, Crowd, Family
from tests.engine.open_engine import BLOCK, OpenEngine, Output, Request
from tests.support.nursery import Nursery

L1_BYTES = 64 << 20
CHUNK = 256
OUTPUTS = 24
ROOMY = 256
"""Blocks of the GPU where nobody has to make room."""
RUN = [pytest.param(family, marks=[] if family.sliced else pytest.mark.slow, id=family.name) for family in FAMILIES if not family.refused]
MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "tensor-parallel": ("full", {"tensor_parallel_size": 2}),
    "pipeline-parallel": ("sinks", {"pipeline_parallel_size": 2}),
    "ahead": ("sinks", {"schedule_ahead": True}),
}
"""Families, and what their engines get beside their own arguments."""
PARALLEL = {"tensor_parallel_size", "pipeline_parallel_size"}
TWO_CORES = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
VISIBLE = 0.02
"""How far the logprob of a first token must move, in nats, for a test to see it."""


class Lab:
    """What the families share: processes, and prompts that nobody else has."""

    def __init__(self, directory: Path, servers: Nursery, pool: Pool, mooncake: Mooncake) -> None:
        self.directory, self.servers, self.pool, self.mooncake = directory, servers, pool, mooncake
        self._ending: list[Future[None]] = []
        self._threads = ThreadPoolExecutor(3)

    def engine(self, family: Family, name: str, *, local: bool = False, store: bool = False, **arguments: Any) -> OpenEngine:
        """An engine of the family, with these tiers; without any it caches nothing."""
        folder = self._folder(family)
        connector = None
        if local or store:
            connector = self.pool.connector(L1_BYTES if local else None, self.mooncake.address if store else None, **PATIENT)
        given = {
            "load_format": "dummy",
            "max_num_batched_tokens": CHUNK,
            "num_gpu_blocks_override": family.crowd.blocks if family.crowd else ROOMY,
            **family_models.arguments(family, folder),
            **arguments,
        }
        return OpenEngine(
            self.servers,
            self.directory,
            f"{family.name}-{name}",
            folder,
            connector,
            prefix_caching=connector is not None,
            prepare=partial(family_child.prepare, family.gains),
            environ={"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", **(TWO_CORES if given.keys() & PARALLEL else {})},
            **given,
        )

    def _folder(self, family: Family) -> Path:
        """Of the family's model, written once: an engine that starts may be reading it."""
        folder = self.directory / family.name
        return folder if folder.exists() else family_models.make(family, folder)

    def end(self, *engines: OpenEngine) -> None:
        """End engines while the next ones start."""
        self._ending += [self._threads.submit(engine.end) for engine in engines]

    def wait(self) -> None:
        """All engines have ended; raises what one of them raised."""
        for ending in self._ending:
            ending.result()


@pytest.fixture(scope="module")
def lab(servers: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    directory = tmp_path_factory.mktemp("families")
    with Mooncake(directory / "mooncake") as mooncake, Pool(directory / "pool") as pool:
        lab = Lab(directory, servers, pool, mooncake)
        try:
            yield lab
        finally:
            lab.wait()


class Prompts:
    """Of one family in one mode. `again`, `branch` and `twig` begin as `first` does; `other` has another first third."""

    def __init__(self, family: Family, mode: str) -> None:
        self._random = random.Random(f"{family.name}{mode}")
        self._image = 1 if family.with_images else None
        words = self(family.tokens)
        self.first = self._request(words)
        self.again, self.branch, self.twig = (self._request(words[: family.fork] + self(family.tokens - family.fork)) for _ in range(3))
        third = family.tokens // 3
        self.other = self._request(self(third) + words[third:])

    def __call__(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(2, IMAGE_TOKEN) for _ in range(num_tokens))

    def _request(self, words: Sequence[int]) -> Request:
        if self._image is None:
            return Request(tuple(words), OUTPUTS)
        middle = len(words) // 2
        return Request((*words[:middle], IMAGE_TOKEN, *words[middle + 1 :]), OUTPUTS, image=self._image)


class Trial:
    """The engines of one family, its prompts, and the answers of the reference.

    Args:
        mode: of `MODES`, with its arguments.
    """

    def __init__(self, lab: Lab, family: Family, mode: str = "", **arguments: Any) -> None:
        self.lab, self.family, self.prompts = lab, family, Prompts(family, mode)
        self.reference = lab.engine(family, f"{mode}reference", max_num_seqs=1, **arguments)
        self.saver = lab.engine(family, f"{mode}saver", local=True, store=True, **arguments)
        self.reader = lab.engine(family, f"{mode}reader", store=True, **arguments)
        self._expected: dict[Request, Output] = {}

    def expected(self, request: Request) -> Output:
        request = replace(request, uuid=None)  # which the reference would believe
        if request not in self._expected:
            (answer,) = self.reference.run([request])
            assert answer.cached == 0
            self._expected[request] = answer
        return self._expected[request]

    def check(self, request: Request, answer: Output) -> None:
        """The answer is the reference's, token for token, with the same logprobs, up to a tie within the noise.

        A preempted request computes its own words anew, in one chunk. So does the reference: with 16 bits these are other numbers.
        """
        assert len(answer.tokens) == request.max_tokens
        noise = self.family.noise
        for begin, end in pairwise((0, *answer.preempted, len(answer.tokens))):
            asked = replace(request, tokens=request.tokens + answer.tokens[:begin], max_tokens=request.max_tokens - begin)
            expected = self.expected(asked)
            for at in range(end - begin):
                if answer.tokens[begin + at] != expected.tokens[at]:
                    by = expected.margins[at]  # of two logprobs, each of which may be off by the noise
                    assert by <= 2 * noise, f"a wrong answer: another token {begin + at}, by {by:.4f} nats"
                    return
                off = abs(answer.logprobs[begin + at] - expected.logprobs[at])
                assert off <= noise, f"a wrong answer: the logprob of token {begin + at} is {off:.4f} nats off"

    def differ(self, one: Output, other: Output) -> bool:
        """Whether a test would see that these are not the same answer, as far as both go."""
        moved = (abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=False))
        tokens = (a != b for a, b in zip(one.tokens, other.tokens, strict=False))
        return any(tokens) or max(moved) > max(VISIBLE, self.family.noise)

    def ask(self, engine: OpenEngine, request: Request, cached: int, source: str = "") -> None:
        """The engine's answer is right, and this many tokens of the prompt came from this tier (vLLM's name)."""
        engine.gained()
        (answer,) = engine.run([request])
        self.check(request, answer)
        assert answer.cached == cached
        if source:
            assert engine.gained()[f"prompt_tokens_cached_by_source/{source}"] == cached

    def forget(self, engine: OpenEngine) -> None:
        """Nothing that the engine's own blocks hold is of use afterwards. (Ranks beside others have processes of their own.)"""
        self.settle(engine)
        if engine.facts()["ranks"] == 1:
            engine.do(partial(family_child.overwrite, only=None))
        engine.forget()

    def settle(self, engine: OpenEngine) -> None:
        """Nothing is left behind, and nothing of ours failed."""
        deadline = time.monotonic() + 30.0
        facts = engine.facts()
        while facts["leaks"] or facts["blocks_in_use"]:
            assert time.monotonic() < deadline, f"left behind: {facts['leaks']}, {facts['blocks_in_use']} blocks"
            engine.run([Request(self.prompts(3), 1)])  # acknowledgements travel with steps
            facts = engine.facts()
        assert facts["errors"] == {}
        assert facts["half"]["loads_failed"] == 0

    def end(self) -> None:
        self.lab.end(self.reference, self.saver, self.reader)


def save(trial: Trial) -> None:
    """The saver computes a prompt in chunks, and finds it in its own cache."""
    family, first = trial.family, trial.prompts.first
    cut = trial.saver.facts()["cut_prompts"]
    trial.ask(trial.saver, first, 0)
    assert trial.saver.facts()["cut_prompts"] > cut, "no prompt was cut"
    trial.ask(trial.saver, first, family.hit, "device")


def read_l2(trial: Trial) -> None:
    """The reader, which never computed anything, finds the prompt in the store, and of another one what they share."""
    settled_keys(trial.lab.mooncake)
    trial.reader.join_store(trial.lab.mooncake, trial.prompts, trial.family.largest_block + 1)
    trial.ask(trial.reader, trial.prompts.first, trial.family.hit, "external_unspecified")
    trial.forget(trial.reader)
    trial.ask(trial.reader, trial.prompts.again, trial.family.shared, "external_unspecified")
    trial.settle(trial.reader)


def read_l1(trial: Trial) -> None:
    """The saver finds everything in L1 when its own blocks are worth nothing: alone, and with another prompt in the same steps.

    The branch tells vLLM that prompts part at the fork: from then on the engine keeps what a twig needs there, and so does L1.
    """
    family, first, branch = trial.family, trial.prompts.first, trial.prompts.branch
    trial.forget(trial.saver)
    trial.ask(trial.saver, first, family.hit, "host")
    (answer,) = trial.saver.run([branch])
    trial.check(branch, answer)
    trial.forget(trial.saver)
    for request, answer in zip((first, branch), trial.saver.run([first, branch]), strict=True):
        trial.check(request, answer)
        assert answer.cached == family.hit
    trial.forget(trial.saver)
    trial.ask(trial.saver, trial.prompts.twig, family.junction, "host")


def preempt(trial: Trial, crowd: Crowd) -> None:
    """More than fits: some are put off and come back."""
    requests = [Request(trial.prompts(crowd.tokens), crowd.outputs) for _ in range(crowd.number)]
    before = trial.saver.facts()["num_preemptions"]
    for request, answer in zip(requests, trial.saver.run(requests), strict=True):
        trial.check(request, answer)
    preempted = int(trial.saver.facts()["num_preemptions"] - before)
    assert preempted > 0, "nobody was preempted"
    trial.settle(trial.saver)


def tell_pictures_apart(trial: Trial) -> None:
    """The same text with another picture: nothing from the picture on is found."""
    first = trial.prompts.first
    other = replace(first, image=2)
    assert trial.expected(other).tokens != trial.expected(first).tokens, "the picture decides nothing"
    before = first.tokens.index(IMAGE_TOKEN) // BLOCK * BLOCK
    trial.forget(trial.saver)
    trial.ask(trial.saver, other, before)
    trial.forget(trial.saver)
    trial.ask(trial.saver, first, trial.family.hit)
    believe_no_client(trial, first, other, before)


def believe_no_client(trial: Trial, first: Request, other: Request, before: int) -> None:
    """A client gives two pictures one id, on two engines: the second engine finds what stands before the picture, and answers right."""
    uuid = "ab" * 32  # as vLLM's own digests look
    trial.ask(trial.saver, replace(first, uuid=uuid), before)
    trial.settle(trial.saver)
    trial.forget(trial.reader)
    trial.ask(trial.reader, replace(other, uuid=uuid), before)


def see_every_group(trial: Trial) -> None:
    """The last act of a saver: with wrong numbers in the blocks of any one group, or another first third, it answers otherwise."""
    first, other = trial.prompts.first, trial.prompts.other
    expected = trial.expected(first)
    assert trial.differ(trial.expected(other), expected), "the prompt's first third decides nothing"
    for group in range(len(trial.family.groups)):
        trial.forget(trial.saver)
        trial.ask(trial.saver, first, trial.family.hit)
        assert trial.saver.do(partial(family_child.overwrite, only=group)) > 0
        (answer,) = trial.saver.run([Request(first.tokens, 4, image=first.image)])
        assert answer.cached == trial.family.hit
        assert trial.differ(answer, expected), f"group {group} decides nothing"


@pytest.mark.parametrize("family", RUN)
def test_family(lab: Lab, family: Family) -> None:
    trial = Trial(lab, family)
    try:
        groups = tuple(trial.saver.do(family_child.layout))
        if groups == family.wide_groups and not torch.cpu._is_avx512_bf16_supported():
            pytest.skip("this CPU has no instructions for bfloat16, so vLLM cuts blocks that this family's figures are not for")
        assert groups == family.groups
        trial.saver.join_store(lab.mooncake, trial.prompts, family.largest_block + 1)
        save(trial)
        read_l2(trial)
        read_l1(trial)
        if family.with_images:
            tell_pictures_apart(trial)
        if family.crowd:
            preempt(trial, family.crowd)
        see_every_group(trial)
    finally:
        trial.end()


@pytest.mark.parametrize("mode", MODES)
def test_mode(lab: Lab, mode: str) -> None:
    name, arguments = MODES[mode]
    (family,) = [family for family in FAMILIES if family.name == name]
    trial = Trial(lab, family, mode, **arguments)
    try:
        trial.saver.join_store(lab.mooncake, trial.prompts, family.largest_block + 1)
        save(trial)
        read_l2(trial)
        read_l1(trial)
        assert family.crowd
        preempt(trial, family.crowd)
        facts = trial.saver.facts()
        assert facts["ranks"] == (1 if mode == "ahead" else 2)
        assert (facts["schedules_ahead"] > 0) == (mode != "tensor-parallel"), "pipelines do, too"
    finally:
        trial.end()


@pytest.mark.parametrize("family", [family for family in FAMILIES if family.refused], ids=lambda family: family.name)
def test_a_family_that_is_refused(lab: Lab, family: Family) -> None:
    """No tier is used, the log says why, and answers are right."""
    trial = Trial(lab, family)
    try:
        assert tuple(trial.saver.do(family_child.layout)) == family.groups
        for engine in (trial.saver, trial.saver, trial.reader):
            trial.ask(engine, trial.prompts.first, 0)
        assert family.refused in trial.saver.log.read_text(errors="replace")
        assert trial.saver.facts()["half"]["blocks_saved"] == 0
    finally:
        trial.end()
