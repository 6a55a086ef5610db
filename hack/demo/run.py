"""`make demo`: the main job from nothing, step by step, with every claim checked."""

from __future__ import annotations

import asyncio
import os
import random
import statistics

from rich.console import Console
from rich.table import Table

from hack.cluster.binaries import cache_root
from hack.demo.journey import ENGINE, NAMESPACE, POOL, Journey
from hack.demo.progress import Progress
from hack.demo.setup import Setup
from hack.durations import Durations, clock

TOGETHER = "binaries, images and vLLM, side by side"


def plan(bumps: int) -> dict[str, float]:
    """Every step, and about how many seconds it takes on two cores with empty caches."""
    return {
        TOGETHER: 420,
        "models": 5,
        "cluster": 25,
        "load images": 15,
        "helm install": 10,
        "kubectl apply": 5,
        "pool and engines become Ready": 120,
        "look at the engines": 2,
        "prompts to replica A, then to replica B": 10,
        "push new weights, look at them": 3,
        "the same prompts again": 10,
        "raise resetEpoch, the same prompts once more": 10,
        f"{bumps} more bumps": 10,
    }


def demo(console: Console, seed: int | None, bumps: int) -> int:
    """Run everything; the exit status is 0 only when every claim held."""
    setup = Setup()
    seed = random.SystemRandom().randrange(1_000_000) if seed is None else seed
    steps = plan(bumps)
    progress = Progress(console, Durations(cache_root() / "demo-durations.json"), len(steps), steps)
    note = progress.note
    with progress.step(TOGETHER):
        archives = setup.prepare(note)
    with progress.step("models"):
        setup.make_models(note)
    with progress.step("cluster"):
        setup.bring_up(note)
    with progress.step("load images"):
        setup.load_images(archives, note)
    with progress.step("helm install"):
        setup.install(note)
    with progress.step("kubectl apply"):
        setup.apply(note)
    with progress.step("pool and engines become Ready"):
        setup.wait_ready(note)
    journey = Journey(setup.kube(), note, seed)
    console.print(f"        prompts are drawn with --seed {seed}", highlight=False)
    with progress.step("look at the engines"):
        journey.prepare()
    with progress.step("prompts to replica A, then to replica B"):
        journey.share()
    with progress.step("push new weights, look at them"):
        journey.push()
    with progress.step("the same prompts again"):
        journey.after()
    with progress.step("raise resetEpoch, the same prompts once more"):
        bump = journey.reset()
    with progress.step(f"{bumps} more bumps"):
        samples = measure(setup, bumps)
    journey.claims.show(console, "What was promised, and what was seen")
    show_numbers(console, bump.milliseconds, samples, progress.elapsed)
    broken = journey.claims.broken
    if broken:
        console.print(f"[bold red]{len(broken)} of {len(journey.claims.items)} claims did not hold.[/]")
        console.print(setup.diagnosis(), markup=False, highlight=False)
        return 1
    console.print(f"[bold green]All {len(journey.claims.items)} claims held[/] in {clock(progress.elapsed)}.")
    show_next(console, journey.epoch() + 1)
    return 0


def measure(setup: Setup, bumps: int) -> list[float]:
    """Milliseconds from sending each patch to seeing its epoch published."""
    if not bumps:
        return []
    os.environ["KUBECONFIG"] = str(setup.provider.kubeconfig())
    from bench.bump_to_published import measure as measure_bumps

    return [bump.milliseconds for bump in asyncio.run(measure_bumps(NAMESPACE, POOL, bumps, 0.3, 90.0))]


def show_numbers(console: Console, first: float, samples: list[float], seconds: float) -> None:
    """Timings; nothing depends on them."""
    table = Table("number", "value", title="Numbers of this run", title_justify="left")
    table.add_row("patch to published", f"{first:.0f} ms")
    if samples:
        table.add_row(f"patch to published, median of {len(samples)} bumps", f"{statistics.median(samples):.1f} ms")
        table.add_row(f"patch to published, maximum of {len(samples)} bumps", f"{max(samples):.1f} ms")
    table.add_row("whole demo", clock(seconds))
    console.print(table)


def show_next(console: Console, epoch: int) -> None:
    """What to try on the cluster that is left up."""
    lines = f"""
The cluster is still up. Try:
  eval "$(.build/venv/bin/python -m hack.cluster env)"
  kubectl -n {NAMESPACE} get kvp,ie,pods
  kubectl -n {NAMESPACE} patch kvp {POOL} --type=merge -p '{{"spec":{{"resetEpoch":{epoch}}}}}' && \\
    kubectl -n {NAMESPACE} wait kvp/{POOL} --for=condition=EpochConverged --timeout=60s
  kubectl -n {NAMESPACE} patch kvp {POOL} --type=merge -p '{{"spec":{{"resetEpoch":0}}}}'    # refused: it never goes down
  kubectl -n {NAMESPACE} describe ie {ENGINE}
  docs/reference/cli.md, "From outside of a cluster", has what `epochkv status`, `epochkv weights` and `epochkv reset` need here
  make demo    # again, on the warm cluster
  make down    # remove everything"""
    console.print(lines, markup=False, highlight=False, soft_wrap=True)
