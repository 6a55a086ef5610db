"""Tokens that an engine finds which another engine computed, by family of models: ours, vLLM's MooncakeStoreConnector, no connector.

The models are tiny and random, and made by the tests (`tests.engine.families`). Of each family a first engine answers a prompt and
its follow-up, and a second engine is asked the same prompt, one that shares three quarters of it, and the follow-up with another
turn. The same prompts go to each of the three pairs; ours and vLLM's use one store and write their own copies.
"""

from __future__ import annotations

import argparse
import random
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from bench.report import Figure, Progress, Row
from hack.demo.stock import stock_connector
from hack.standalone.mooncake import Mooncake
from hack.standalone.pool import Pool
from hack.waiting import eventually
from tests.engine import family_child, family_models
from tests.engine.conftest import PATIENT, nursery
from tests.engine.families import FAMILIES, Family
from tests.engine.open_engine import OpenEngine, Request

TURN_TOKENS, ANSWER_TOKENS = 200, 24
LOOK_SECONDS, EQUAL_LOOKS = 0.5, 5
ALLOCATED = re.compile(r"^master_allocated_bytes(?:\{[^}]*\})? (\S+)", re.MULTILINE)
RATIO = "tokens found, ours / vLLM's"


class Lab:
    """A nursery of engines, and a store.

    Each family has a pool of its own, which ends with it: a pool's hub removes keys of weights that nobody has held for 10 minutes.
    """

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.servers = nursery()
        self.mooncake = stack.enter_context(Mooncake(folder / "mooncake"))
        stock, environ = stock_connector(folder, self.mooncake)
        self.kinds: dict[str, tuple[Any, Mapping[str, str]]] = {"ours": (None, {}), "vllm": (stock, environ), "gpu": (None, {})}

    @contextmanager
    def pool(self, family: Family) -> Iterator[None]:
        """Our engines are in this pool."""
        with Pool(self.folder / f"pool-{family.name}") as pool:
            self.kinds["ours"] = (pool.connector(None, self.mooncake.address, **PATIENT), {})
            yield

    def model(self, family: Family) -> Path:
        """Of the family, written once."""
        folder = self.folder / family.name
        return folder if folder.exists() else family_models.make(family, folder)

    def engine(self, family: Family, kind: str, name: str) -> OpenEngine:
        folder = self.model(family)
        connector, environ = self.kinds[kind]
        sizes = {"max_num_batched_tokens": 256, "num_gpu_blocks_override": 256, "max_model_len": 4096}
        return OpenEngine(
            self.servers,
            self.folder,
            f"{family.name}-{kind}-{name}",
            folder,
            connector,
            prepare=partial(family_child.prepare, family.gains),
            environ={"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", **environ},
            **{"load_format": "dummy", **sizes, **family_models.arguments(family, folder)},
        )

    def allocated(self) -> float:
        """Bytes in the store."""
        return sum(float(value) for value in ALLOCATED.findall(self.mooncake.admin("metrics")))

    def settle(self) -> None:
        """Return when the store has not grown for some seconds."""
        seen: list[float] = []

        def still() -> bool:
            time.sleep(LOOK_SECONDS)
            seen.append(self.allocated())
            return len(seen) >= EQUAL_LOOKS and len(set(seen[-EQUAL_LOOKS:])) == 1

        eventually(still, "a store that grows no more", 60.0)


def conversation(family: Family) -> tuple[Callable[[Sequence[int]], list[Request]], Request]:
    """What the second engine is asked, given the answer to the first request; and that request."""
    rng = random.Random(family.name)

    def words(number: int) -> tuple[int, ...]:
        return tuple(rng.randrange(2, 500) for _ in range(number))

    first, branch, turns = words(family.tokens), words(family.tokens - family.fork), (words(TURN_TOKENS), words(TURN_TOKENS))

    def asked(answer: Sequence[int]) -> list[Request]:
        follow_up = (*first, *answer, *turns[0])
        later = [Request(follow_up, ANSWER_TOKENS), Request((*follow_up, *turns[1]), ANSWER_TOKENS)]
        return [Request(first, ANSWER_TOKENS), Request((*first[: family.fork], *branch), ANSWER_TOKENS), *later]

    return asked, Request(first, ANSWER_TOKENS)


def measure(lab: Lab, family: Family, kind: str) -> dict[str, Any]:
    """Tokens found by the second engine of this kind, of so many asked for, its answers, and bytes put for each 1,000 tokens."""
    asked, first = conversation(family)
    before = lab.allocated()
    writer, reader = (lab.engine(family, kind, name) for name in ("writer", "reader"))
    try:
        (answer,) = writer.run([first])
        requests = asked(answer.tokens)
        writer.run([requests[2]])
        if kind != "gpu":
            lab.settle()
        written = lab.allocated() - before
        outputs = [reader.run([request])[0] for request in requests]
    finally:
        writer.end()
        reader.end()
    return {
        "found": [output.cached for output in outputs],
        "asked": [len(request.tokens) for request in requests],
        "bytes_per_1000_tokens": written / len(requests[2].tokens) * 1e3,
        "answers": [output.tokens for output in outputs],
    }


def figures(family: Family, found: Mapping[str, dict[str, Any]]) -> list[Figure]:
    """Of one family. With 16 bits, the place where a prompt is cut changes an answer: then there is no aim."""
    tokens = {kind: sum(one["found"]) for kind, one in found.items()}
    asked = sum(found["gpu"]["asked"])
    wrong = max(sum(a != b for a, b in zip(one["answers"], found["gpu"]["answers"], strict=True)) for one in found.values())
    return [
        Figure(f"{family.name}: {RATIO}", tokens["ours"] / max(1, tokens["vllm"]), 1.0, "", at_least=True),
        *(Figure(f"{family.name}: found by {kind} of {asked}", number, None, "tokens") for kind, number in tokens.items()),
        Figure(f"{family.name}: other answers than without a connector", wrong, 0 if family.noise < 0.1 else None, "of 4"),
        *(
            Figure(f"{family.name}: put by {kind}", found[kind]["bytes_per_1000_tokens"] / 1e3, None, "kB per 1,000 tokens")
            for kind in ("ours", "vllm")
        ),
    ]


def row(_: argparse.Namespace, progress: Progress) -> Row:
    """One line for each family; see the module's docstring."""
    measured: list[Figure] = []
    details: dict[str, Any] = {}
    families = [family for family in FAMILIES if not family.refused and not family.with_images]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="epochkv-bench-") as name, ExitStack() as stack:
        lab = Lab(Path(name), stack)
        for index, family in enumerate(families):
            with lab.pool(family):
                details[family.name] = {kind: measure(lab, family, kind) for kind in lab.kinds}
            measured += figures(family, details[family.name])
            progress.step(index + 1, len(families), began)
    return Row("tokens found of what another engine computed", measured, details)
