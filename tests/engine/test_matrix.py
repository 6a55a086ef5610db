"""Every mode of the connector on whole engines: tiers x attention x ranks, each with chunked prefill, preemption, salts, adapters.

Each cell is one engine (two where an L2 is read by another engine) that answers the same way as an engine without any cache, and
each shows which tier the tokens came from, that requests were preempted, prompts were cut, drafts were made.
`make test` runs the cells in `SLICE`, `make test-all` the whole product.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hack import models
from hack.standalone.mooncake import Mooncake
from hack.standalone.pool import Pool
from tests.engine.conftest import PATIENT, settled_keys
from tests.engine.matrix_engine import BLOCK, MatrixEngine, Nursery, Request

L1_BYTES = 64 << 20
WINDOWS: dict[str, tuple[int | None, ...]] = {
    "full": (None,) * 6,
    "sliding": (None, 64) * 3,
    "three": (None, 64, 160) * 2,
}
GROUPS = {
    "full": [["FullAttentionSpec", None]],
    "sliding": [["FullAttentionSpec", None], ["SlidingWindowSpec", 64]],
    "three": [["FullAttentionSpec", None], ["SlidingWindowSpec", 64], ["SlidingWindowSpec", 160]],
}
BLOCKS = {"full": 28, "sliding": 40, "three": 60}
"""Of the engine's own cache: six growing requests do not fit, one of the longest does."""
CHUNK = 128
TIERS = ("none", "l1", "l2", "both")
RANKS = {"one": {}, "tp2": {"tensor_parallel_size": 2}, "pp2": {"pipeline_parallel_size": 2}}
KINDS: dict[str, dict[str, Any]] = {
    "all": {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8},
    "ahead": {"schedule_ahead": True},
    "ngram": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}},
}


@dataclass(frozen=True)
class Cell:
    """One engine of the matrix."""

    attention: str
    tiers: str
    ranks: str = "one"
    kind: str = "all"

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.attention}-{self.tiers}-{self.ranks}"

    @property
    def source(self) -> str | None:
        """Where an engine that has forgotten its own cache finds what it computed: L1 before L2."""
        return {"none": None, "l1": "host", "l2": "external_unspecified", "both": "host"}[self.tiers]


WHOLE = [
    *(Cell(attention, tiers, ranks) for attention in WINDOWS for tiers in TIERS for ranks in RANKS),
    *(Cell(attention, tiers, kind=kind) for attention in WINDOWS for tiers in TIERS for kind in ("ahead", "ngram")),
]
SLICE = [
    Cell("full", "l1"),
    Cell("full", "l2", kind="ngram"),
    Cell("full", "both", "tp2"),
    Cell("sliding", "none"),
    Cell("sliding", "l1", "pp2"),
    Cell("sliding", "l2"),
    Cell("sliding", "both", kind="ahead"),
    Cell("three", "l1", kind="ahead"),
    Cell("three", "l2", "pp2"),
    Cell("three", "both", kind="ngram"),
    Cell("three", "both"),
]
"""Every kind of attention with every tier, and every rank and feature with two of each."""
CELLS = [pytest.param(cell, marks=[] if cell in SLICE else pytest.mark.slow, id=cell.name) for cell in WHOLE]


def whole_blocks(prompt: Sequence[int]) -> int:
    """Tokens of a prompt that a cache can give: vLLM computes at least the last one."""
    return (len(prompt) - 1) // BLOCK * BLOCK


class Lab:
    """What the cells share: processes, weights, and answers of engines that cache nothing."""

    def __init__(self, directory: Path, nursery: Nursery, pool: Pool, mooncake: Mooncake) -> None:
        self.directory, self.nursery, self.pool, self.mooncake = directory, nursery, pool, mooncake
        shapes = {attention: models.Shape(layers=6, windows=windows) for attention, windows in WINDOWS.items()}
        self.weights = {name: models.make(directory / name, seed, shape) for seed, (name, shape) in enumerate(shapes.items(), 1)}
        shape = shapes["full"]
        self.adapters = [str(models.make_adapter(directory / f"adapter-{seed}", seed, shape)) for seed in (11, 12)]
        self._random = random.Random(5)
        self._references: dict[str, MatrixEngine] = {}

    def prompt(self, num_tokens: int) -> tuple[int, ...]:
        """One that no other cell has."""
        return tuple(self._random.randrange(2, 512) for _ in range(num_tokens))

    def expected(self, attention: str, requests: Sequence[Request]) -> list[tuple[int, ...]]:
        """Answers of an engine without prefix cache and connector, one request at a time."""
        if attention not in self._references:
            lora = KINDS["all"]
            self._references[attention] = MatrixEngine(
                self.nursery, f"reference-{attention}", self.weights[attention], prefix_caching=False, max_num_seqs=1, **lora
            )
        outputs = self._references[attention].run(requests)
        assert not any(output.cached for output in outputs)
        return [output.tokens for output in outputs]

    def engine(self, cell: Cell, name: str) -> MatrixEngine:
        """An engine of the cell; the matrix has a pool for itself whose epoch does not change."""
        local = L1_BYTES if cell.tiers in ("l1", "both") else None
        master = self.mooncake.address if cell.tiers in ("l2", "both") else None
        ranks = RANKS[cell.ranks]
        return MatrixEngine(
            self.nursery,
            name,
            self.weights[cell.attention],
            self.pool.connector(local, master, **PATIENT),
            environ={"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if ranks else {},
            max_model_len=384,
            max_num_batched_tokens=CHUNK,
            num_gpu_blocks_override=BLOCKS[cell.attention],
            **ranks,
            **KINDS[cell.kind],
        )

    def end(self) -> None:
        """End the references."""
        for engine in self._references.values():
            engine.end()


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    directory = tmp_path_factory.mktemp("matrix")
    with (
        Nursery(directory) as nursery,
        Mooncake(directory / "mooncake") as mooncake,
        Pool(directory / "pool") as pool,
    ):
        lab = Lab(directory, nursery, pool, mooncake)
        try:
            yield lab
        finally:
            lab.end()


class Trial:
    """One engine of a cell under test."""

    def __init__(self, lab: Lab, cell: Cell, engine: MatrixEngine) -> None:
        self.lab, self.cell, self.engine = lab, cell, engine

    def settle(self) -> None:
        """Saves have reached the tier they go to."""
        if self.cell.tiers in ("l2", "both"):
            settled_keys(self.lab.mooncake)

    def end(self) -> None:
        """Nothing is left behind, and nothing of ours failed."""
        deadline = time.monotonic() + 30.0
        facts = self.engine.facts()
        while facts["leaks"] or facts["blocks_in_use"]:
            assert time.monotonic() < deadline, f"left behind: {facts['leaks']}, {facts['blocks_in_use']} blocks"
            self.engine.run([Request(self.lab.prompt(3), 1)])  # acknowledgements travel with steps
            facts = self.engine.facts()
        assert facts["errors"] == {}
        assert facts.get("half", {}).get("loads_failed", 0) == 0


def start(lab: Lab, cell: Cell, name: str) -> Trial:
    """An engine that has joined its tiers and is what the cell says."""
    trial = Trial(lab, cell, lab.engine(cell, name))
    facts = trial.engine.facts()
    assert facts["groups"] == GROUPS[cell.attention]
    assert facts["ranks"] == (1 if cell.ranks == "one" else 2)
    assert facts["scheduler"] == ("AsyncScheduler" if cell.kind == "ahead" else "Scheduler")
    if cell.tiers in ("l2", "both"):
        trial.engine.join_store(lab.mooncake, lab.prompt)
    return trial


def identities(lab: Lab, cell: Cell) -> list[Request]:
    """Requests that share no block with each other, although some have one text."""
    one, other = lab.prompt(300), lab.prompt(200)
    requests = [Request(one), Request(other)]
    if cell.kind == "all":
        requests += [Request(one, salt="s1"), Request(one, adapter=lab.adapters[0])]
    return requests


def strangers(lab: Lab, requests: Sequence[Request]) -> list[Request]:
    """The same texts under names that nobody has used."""
    return [Request(requests[0].tokens, salt="s2"), Request(requests[0].tokens, adapter=lab.adapters[1])]


def prefill_and_reuse(trial: Trial) -> list[Request]:
    """Cold in chunks; again from the engine's own cache; again from the tier; other salts and adapters find nothing."""
    lab, cell = trial.lab, trial.cell
    requests = identities(lab, cell)
    expected = lab.expected(cell.attention, requests)
    everything = [whole_blocks(request.tokens) for request in requests]
    cut = trial.engine.facts()["cut_prompts"]
    for index, request in enumerate(requests):  # one after the other, so that a shared block would be found
        trial.engine.ask([request], [expected[index]], [0])
    assert trial.engine.facts()["cut_prompts"] - cut >= len(requests), "no prompt was cut"
    trial.engine.ask(requests[-1:], expected[-1:], everything[-1:], device=everything[-1])
    trial.settle()
    trial.engine.forget()
    found = everything if cell.source else [0] * len(requests)
    trial.engine.ask(requests, expected, found, **{cell.source or "nowhere": sum(found)})
    if cell.kind == "all":
        others = strangers(lab, requests)
        answers = lab.expected(cell.attention, others)
        assert len({expected[0], expected[3], answers[1]}) == 3, "the adapters change nothing"
        for other, answer in zip(others, answers, strict=True):
            trial.engine.ask([other], [answer], [0])
    return requests


def preempt(trial: Trial) -> None:
    """More than fits: some are put off and come back, from a tier where there is one."""
    lab, cell = trial.lab, trial.cell
    requests = [Request(lab.prompt(150), 70) for _ in range(6)]
    expected = lab.expected(cell.attention, requests)
    before = trial.engine.facts()["num_preemptions"]
    outputs = trial.engine.run(requests)
    assert [output.tokens for output in outputs] == expected
    assert trial.engine.facts()["num_preemptions"] > before, "nobody was preempted"


def check_kind(trial: Trial) -> None:
    """What the engine was built for has happened."""
    facts = trial.engine.facts()
    if trial.cell.kind == "ahead":
        assert facts["schedules_ahead"] > 0
    if trial.cell.kind == "ngram":
        assert facts["draft_tokens"] > 0
        assert facts["spec_decode_num_draft_tokens"] > 0


def read_elsewhere(lab: Lab, cell: Cell, requests: Sequence[Request]) -> None:
    """Another engine finds in the store what the first one computed, by salt and adapter."""
    trial = start(lab, cell, f"{cell.name}-reader")
    try:
        everything = [whole_blocks(request.tokens) for request in requests]
        trial.engine.ask(requests, lab.expected(cell.attention, requests), everything, external_unspecified=sum(everything))
        trial.end()
    finally:
        trial.engine.end()


@pytest.mark.parametrize("cell", CELLS)
def test_cell(lab: Lab, cell: Cell) -> None:
    trial = start(lab, cell, cell.name)
    try:
        requests = prefill_and_reuse(trial)
        preempt(trial)
        check_kind(trial)
        trial.settle()
        trial.end()
    finally:
        trial.engine.end()
    if cell.tiers in ("l2", "both") and cell.kind == "all":
        read_elsewhere(lab, cell, requests)
