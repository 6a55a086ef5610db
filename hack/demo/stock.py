"""`make demo-stock`: what goes wrong today, and what does not with EpochKV. No cluster: two vLLM engines and one Mooncake store.

One story, told three times: engine A gets new weights and resets every cache it knows of; engine B is late, still has the old weights, and
serves the same prompt, whose KV goes to the shared store; then A is asked. With vLLM's own MooncakeStoreConnector A finds B's
old KV under the name of its own and answers from it. With EpochKV the names differ: in its own connector, and also under vLLM's.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from hack import models
from hack.cluster.binaries import cache_root
from hack.demo.claims import Claims
from hack.demo.journey import ANSWER_TOKENS, BLOCKS, CACHED, PROMPT_TOKENS, Prompt, make_prompts
from hack.demo.progress import Progress
from hack.durations import Durations, clock
from hack.engine_api import Answer
from hack.standalone.engine import Engine
from hack.standalone.mooncake import Mooncake
from hack.standalone.pool import Pool
from hack.standalone.process import Popen, nothing_left
from hack.waiting import eventually

STEPS = 9


@dataclass(frozen=True)
class Reference:
    """Answers of an engine without any cache: under both sets of weights, and of the second prompt under the new ones."""

    old: tuple[int, ...]
    new: tuple[int, ...]
    second: tuple[int, ...]


@dataclass(frozen=True)
class Weights:
    """Folders of the two sets of weights."""

    base: Path
    new: Path


@dataclass(frozen=True)
class Stage:
    """What every act has."""

    folder: Path
    weights: Weights
    prompt: Prompt
    second: Prompt
    reference: Reference
    progress: Progress
    claims: Claims
    popen: Popen = subprocess.Popen


def demo(console: Console, seed: int | None) -> int:
    """Tell the story with each connector; the exit status is 0 only when every claim held."""
    seed = random.SystemRandom().randrange(1_000_000) if seed is None else seed
    progress = Progress(console, Durations(cache_root() / "demo-stock-durations.json"), STEPS)
    prompt, second = make_prompts(seed, 2)
    console.print(f"Prompts of {PROMPT_TOKENS} tokens are drawn with --seed {seed}.", highlight=False)
    claims = Claims()
    with tempfile.TemporaryDirectory(prefix="epochkv-demo-") as name, nothing_left(lambda line: console.print(line, highlight=False)):
        os.environ["TMPDIR"] = name  # vLLM leaves its sockets behind
        folder = Path(name)
        weights = Weights(models.make(folder / "base", 1), models.make(folder / "new", 2))
        with (
            progress.step("an engine without any cache answers first", 40),
            Engine("reference", weights.base, folder, prefix_caching=False) as bare,
        ):
            reference = ask_reference(bare, weights, prompt, second)
        claims.check("the new weights change the answer", reference.old != reference.new, "yes", _yes(reference.old != reference.new))
        stage = Stage(folder, weights, prompt, second, reference, progress, claims)
        stale, ours, fenced = act_of_stock(stage), act_of_ours(stage), act_of_fence(stage)
    claims.show(console, "One engine is late with its reset")
    if claims.broken:
        console.print(f"[bold red]{len(claims.broken)} of {len(claims.items)} claims did not hold.[/]")
        return 1
    console.print(
        f"vLLM's own connector: [bold red]{stale.cached} stale tokens, wrong answer[/]. "
        f"EpochKV: [bold green]{ours.cached} stale tokens, right answer[/]. "
        f"vLLM's own connector with EpochKV's fence: [bold green]{fenced.cached} stale tokens, right answer[/]. ({clock(progress.elapsed)})"
    )
    return 0


def act_of_stock(stage: Stage) -> Answer:
    """vLLM's own connector, as it is."""
    with Mooncake(stage.folder / "stock") as mooncake, ExitStack() as stack:
        connector, environ = stock_connector(stage.folder, mooncake)
        with stage.progress.step("two engines with vLLM's MooncakeStoreConnector", 60):
            a, b = start(stack, stage, stage.folder / "stock", connector, environ)
        with stage.progress.step("A resets, B is late", 5):
            stale = late_reset(a, b, mooncake, stage)
    stage.claims.equal("vLLM's connector: stale tokens that A reuses", stale.cached, CACHED)
    wrong = stale.tokens != stage.reference.new
    stage.claims.check("vLLM's connector: A's answer is wrong", wrong, "yes", _yes(wrong))
    return stale


def act_of_ours(stage: Stage) -> Answer:
    """Our connector."""
    folder = stage.folder / "ours"
    with Mooncake(folder) as mooncake, Pool(folder) as pool, ExitStack() as stack:
        # Two engines share two cores here: a lookup that is late would be a miss, and the demo wants to show hits.
        connector = pool.connector(local_bytes=64 << 20, master_address=mooncake.address, lookup_deadline_ms=500.0)
        with stage.progress.step("two engines with EpochKV", 60):
            a, b = start(stack, stage, folder, connector, {})
            pool.wait_engines(2)
        with stage.progress.step("the same story with EpochKV", 5):
            fresh = late_reset(a, b, mooncake, stage, pool)
        check_fresh(fresh, "EpochKV", stage)
        with stage.progress.step("B gets the new weights, too", 5):
            catch_up(a, b, mooncake, pool, "EpochKV", stage)
    return fresh


def act_of_fence(stage: Stage) -> Answer:
    """vLLM's own connector, with the names of our fence under it."""
    folder = stage.folder / "fenced"
    with Mooncake(folder) as mooncake, Pool(folder) as pool, ExitStack() as stack:
        connector, environ = stock_connector(folder, mooncake)
        fence = {"EPOCHKV_FENCE": "1", "EPOCHKV_CONFIG": str(pool.credentials)}
        with stage.progress.step("two engines with vLLM's connector and EPOCHKV_FENCE=1", 60):
            a, b = start(stack, stage, folder, connector, {**environ, **fence})
            pool.wait_engines(2)
        with stage.progress.step("the same story with vLLM's connector and the fence", 5):
            fresh = late_reset(a, b, mooncake, stage, pool, keeps_store=True)
        check_fresh(fresh, "Fence", stage)
        with stage.progress.step("B gets the new weights, too, with the fence", 5):
            catch_up(a, b, mooncake, pool, "Fence", stage)
    return fresh


def check_fresh(fresh: Answer, who: str, stage: Stage) -> None:
    """A found nothing old."""
    stage.claims.equal(f"{who}: stale tokens that A reuses", fresh.cached, 0)
    right = fresh.tokens == stage.reference.new
    stage.claims.check(f"{who}: A answers as without a cache", right, "yes", _yes(right))


def ask_reference(engine: Engine, weights: Weights, prompt: Prompt, second: Prompt) -> Reference:
    """What an engine without any cache, whose weights are the old ones, answers."""
    old = engine.complete(prompt, ANSWER_TOKENS)
    engine.reload_weights(weights.new)
    new = engine.complete(prompt, ANSWER_TOKENS)
    last = engine.complete(second, ANSWER_TOKENS)
    return Reference(old.tokens, new.tokens, last.tokens)


def stock_connector(folder: Path, mooncake: Mooncake) -> tuple[dict[str, Any], dict[str, str]]:
    """`--kv-transfer-config` of vLLM's own connector, and the environment it reads the rest from."""
    config = folder / "mooncake.json"
    config.write_text(
        json.dumps(
            {
                "metadata_server": "P2PHANDSHAKE",
                "master_server_address": mooncake.address,
                "protocol": "tcp",
                "mode": "standalone-store",
                "global_segment_size": 0,
                "local_buffer_size": 64 << 20,
            }
        )
    )
    connector = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    return connector, {"MOONCAKE_CONFIG_PATH": str(config), "VLLM_HOST_IP": "127.0.0.1"}


def start(stack: ExitStack, stage: Stage, folder: Path, connector: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[Engine, Engine]:
    """Engines A and B with the old weights, both healthy; `stack` ends them, ready or not."""
    engines = []
    for name in ("A", "B"):
        engines.append(Engine(name, stage.weights.base, folder, connector, environ=environ, popen=stage.popen))
        stack.callback(engines[-1].end)
    a, b = (engine.wait_ready() for engine in engines)
    return a, b


def late_reset(a: Engine, b: Engine, mooncake: Mooncake, stage: Stage, pool: Pool | None = None, *, keeps_store: bool = False) -> Answer:
    """The story; A's answer at its end.

    Args:
        pool: of the engines; None: they have none, and nothing of ours.
        keeps_store: claim that A's reset takes nothing from the store, at once or later.
    """
    progress = stage.progress
    a.complete(stage.prompt, ANSWER_TOKENS)
    wait_stored(mooncake, set(), "A")
    before = set(mooncake.keys())
    progress.note("A gets the new weights and resets its prefix cache, on the GPU side and in the store")
    a.reload_weights(stage.weights.new)
    a.reset_prefix_cache(external=True)
    if pool is not None:  # else B could still find what A has saved with the old weights, which are its own
        eventually(lambda: pool.snapshot().published >= 1, lambda: "A's reset did not raise the epoch", 30.0, 0.1)
    stored = set(mooncake.keys())
    if keeps_store:
        stage.claims.equal("Fence: blocks that A's reset leaves in the store", len(before & stored), len(before))
    progress.note("B still has the old weights and serves the prompt; its KV goes to the store")
    b.complete(stage.prompt, ANSWER_TOKENS)
    wait_stored(mooncake, stored, "B")
    progress.note("A, with the new weights, gets the prompt")
    return a.complete(stage.prompt, ANSWER_TOKENS)


def wait_stored(mooncake: Mooncake, before: set[str], who: str) -> None:
    """Return once the prompt's blocks are in the store, besides what was there."""
    eventually(
        lambda: len(set(mooncake.keys()) - before) >= BLOCKS,
        lambda: f"{who} stored {len(set(mooncake.keys()) - before)} of {BLOCKS} blocks",
        30.0,
        0.5,
    )


def catch_up(a: Engine, b: Engine, mooncake: Mooncake, pool: Pool, who: str, stage: Stage) -> None:
    """B gets the new weights: it shares with A again, and nobody has to say so."""
    b.reload_weights(stage.weights.new)
    pool.wait_engines(2)
    before = set(mooncake.keys())
    first = a.complete(stage.second, ANSWER_TOKENS)
    wait_stored(mooncake, before, "A")
    second = b.complete(stage.second, ANSWER_TOKENS)
    stage.claims.equal(f"{who}: tokens that B takes from A with equal weights", second.cached, CACHED)
    same = first.tokens == second.tokens == stage.reference.second
    stage.claims.check(f"{who}: both answer as without a cache", same, "yes", _yes(same))


def _yes(value: bool) -> str:
    return "yes" if value else "no"
