"""Run the test layers one after the other, say how long is left, and close with pytest's own summary line per layer.

Expected durations come from the last run on this machine (kept in the cache folder), or from the table below.
Layers that need no CPU at a certain time run beside the others, one after the other at the lowest priority: those mostly wait.
In layers of real processes up to four tests that failed have one more run by themselves, and are named at the end: a machine
that stands still for seconds ends leases and deadlines. A wrong answer of an engine has none (docs/decisions/0009-tests.md).

    python -m hack.run_tests [LAYER ...]            no layer: those of `make test`; without the tests that are marked `slow`
    python -m hack.run_tests --all [LAYER ...]      no layer: every one; slow tests, too
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from hack.cluster.binaries import cache_root
from hack.durations import Durations, clock

ROOT = Path(__file__).resolve().parent.parent
DEV = ROOT / ".build/venv/bin/python"
ENGINE = ROOT / ".build/venv-engine/bin/python"
WRONG_ANSWER = re.compile(rb"^>.*\btokens\b|^E .*(?:wrong answer|wrong tokens)")
"""Of pytest's report: the line of a test, or its message, that compares what an engine answered."""
FAILED = re.compile(rb"^(?:FAILED|ERROR) (\S.*?)(?: - |$)")
"""Lines of a captured log that begin with ERROR have more blanks behind it."""
MAX_SECOND_RUNS = 4
"""As many tests look at one journey: a connection of it that breaks fails all of them."""
RUNNING: list[subprocess.Popen[bytes]] = []
"""pytest, once for each layer that runs now."""
NO_TESTS = 5
"""pytest's exit status when it ran none."""
BESIDE_SECONDS = 900
"""In which a test must end that runs at the lowest priority, and has no time of its own."""
SUMMARY = re.compile(r"^=+ (.*\b(?:passed|failed|error|errors|skipped|deselected|no tests ran)\b.*) =+$")


@dataclass(frozen=True)
class Layer:
    """One pytest run: `python -m pytest paths`, `without` some of them, expected to take about `seconds`.

    `paths` may be patterns.
    `workers`: how many tests run at a time, a file's tests in one process; more than cores where tests mostly wait for leases,
    deadlines and processes. One engine takes 3 GB, so they have one worker.
    `real`: of processes with leases and deadlines, which a machine that stands still breaks.
    `beside`: runs beside the other layers, at the lowest priority: its tests need no CPU at a certain time.
    `slow`: runs in `make test-all` only, as tests do that are marked so.
    """

    name: str
    python: Path
    paths: tuple[str, ...]
    seconds: int
    workers: int = 1
    real: bool = False
    beside: bool = False
    slow: bool = False
    without: tuple[str, ...] = ()

    @property
    def found(self) -> list[str]:
        """What its paths are, from the root of the repository."""
        found = [str(path.relative_to(ROOT)) for pattern in self.paths for path in sorted(ROOT.glob(pattern))]
        return [path for path in found if path not in self.without]


@dataclass
class Run:
    """How one pytest run ended."""

    status: int
    summary: str
    cpu: float = 0.0
    failed: list[str] = field(default_factory=list)
    wrong_answer: bool = False

    @property
    def may_be_the_machine(self) -> bool:
        return self.status == 1 and 0 < len(self.failed) <= MAX_SECOND_RUNS and not self.wrong_answer


def trainer_python(name: str) -> Path:
    """The interpreter of a trainer's environment (`hack/setup.sh NAME`)."""
    return ROOT / f".build/venv-{name}/bin/python"


NEED_VLLM = ("tests/unit/operator_arguments",)
FAMILIES = "tests/engine/test_families.py"
"""Many engines: they have a layer for themselves."""

LAYERS = (
    Layer("fast", DEV, ("tests/unit/operator*", "tests/unit/hack"), 30, 4, without=NEED_VLLM),
    Layer("fence", DEV, ("tests/unit/fence",), 120, 6, real=True),
    Layer("security", DEV, ("tests/security",), 45, 4, real=True),
    Layer("unit-connector", ENGINE, ("tests/unit/connector_*", *NEED_VLLM, "tests/cuda"), 60, beside=True),
    Layer("scheduler", ENGINE, ("tests/scheduler",), 90, real=True, beside=True),  # plans expire, and idle engines look at weights
    Layer("families", ENGINE, (FAMILIES,), 250, real=True, beside=True),
    Layer("model", DEV, ("tests/model",), 300, beside=True),
    Layer("store", ENGINE, ("tests/store",), 90, 3, real=True),
    Layer("cluster", DEV, ("tests/cluster", "tests/unit/chart", "tests/unit/release"), 330, 3, real=True),
    Layer("engine", ENGINE, ("tests/engine",), 800, real=True, without=(FAMILIES,)),
    Layer("e2e", DEV, ("tests/e2e",), 480, real=True),
    Layer("frameworks", trainer_python("frameworks"), ("tests/trainers/frameworks",), 450, real=True, slow=True),
    Layer("verl", trainer_python("verl"), ("tests/trainers/verl",), 600, real=True, slow=True),
    Layer("trl", trainer_python("trl"), ("tests/trainers/trl",), 600, real=True, slow=True),
)
GROUPS = {
    "unit": ("fast", "fence", "model", "security", "unit-connector"),
    "engine": ("engine", "families"),
    "trainers": ("frameworks", "verl", "trl"),
}


def forgotten() -> list[str]:
    """Folders of tests that no layer names: they would never run."""
    folders = [*(ROOT / "tests").iterdir(), *(ROOT / "tests/unit").iterdir(), *(ROOT / "tests/trainers").iterdir()]
    named = {path for layer in LAYERS for path in layer.found} | {"tests/unit"}
    found = {str(folder.relative_to(ROOT)) for folder in folders if any(folder.glob("test_*.py"))}
    return sorted(found - named)


def run_layer(layer: Layer, extra: Sequence[str], output: IO[bytes]) -> Run:
    """The layer's tests, and once more those of a layer of real processes that failed."""
    if not layer.found:
        return Run(1, f"no such folder: {', '.join(layer.paths)}")
    parallel = ["-n", str(layer.workers), "--dist", "loadfile"] if layer.workers > 1 else []
    ignored = [f"--ignore={path}" for path in layer.without]
    if layer.beside:
        extra = [f"-o=timeout={BESIDE_SECONDS}", *extra]
    first = run_pytest(layer, [*parallel, *layer.found, *ignored, *extra], output)
    if not layer.real or not first.may_be_the_machine:
        return first
    say(output, f"\n==> layer {layer.name}: once more {', '.join(first.failed)}")
    second = run_pytest(layer, [*first.failed, *extra], output)
    second.cpu += first.cpu
    if second.status == 0:
        second.summary = f"{first.summary}; passed on a second run: {', '.join(first.failed)}"
    return second


def say(output: IO[bytes], line: str) -> None:
    output.write(f"{line}\n".encode())
    output.flush()


def run_pytest(layer: Layer, arguments: Sequence[str], output: IO[bytes]) -> Run:
    """Pass pytest's output on as it comes, and read from it how it ended."""
    run = Run(1, "no summary: pytest ended early")
    folder = tempfile.mkdtemp(prefix="ekv-")  # short: names of sockets have at most 107 characters
    environ = {
        **os.environ,
        "TMPDIR": folder,  # engines that are killed leave files in it
        "PYTHONUNBUFFERED": "1",
        "EPOCHKV_PYTHON_DEV": str(DEV),
        "EPOCHKV_PYTHON_ENGINE": str(ENGINE),
    }
    command = [*(("nice", "-n", "19") if layer.beside else ()), str(layer.python), "-m", "pytest", *arguments]
    with subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        RUNNING.append(process)
        assert process.stdout
        rest = b""
        # Chunks, not lines: pytest prints a dot per test, and a line of dots may take minutes.
        while chunk := os.read(process.stdout.fileno(), 65536):
            output.write(chunk)
            output.flush()
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                read_line(line, run)
        # Of the tests and of every process that they waited for.
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        RUNNING.remove(process)
    run.status = 0 if process.returncode == NO_TESTS and "not slow" in arguments else process.returncode
    run.cpu = usage.ru_utime + usage.ru_stime
    if run.status == 0:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        say(output, f"==> logs and files of layer {layer.name} are in {folder}")
    return run


def end(*_: object) -> None:
    """Who is told to end has pytest end what its tests have started."""
    for process in RUNNING:
        process.send_signal(signal.SIGINT)
    raise KeyboardInterrupt


def read_line(line: bytes, run: Run) -> None:
    """What one line of pytest's report says of the run."""
    run.wrong_answer = run.wrong_answer or bool(WRONG_ANSWER.search(line))
    if failed := FAILED.match(line):
        run.failed.append(failed[1].decode())
    if summary := SUMMARY.match(line.decode(errors="replace").strip()):
        run.summary = summary[1]


def slowest(since: float, number: int = 10) -> list[str]:
    """The tests that ended after `since`, by the time that each took (`tests/conftest.py`)."""
    try:
        known = json.loads((ROOT / ".build/durations.json").read_text())
    except (OSError, ValueError):
        return []
    ran = sorted(((seconds, name) for name, (seconds, ended) in known.items() if ended >= since), reverse=True)
    return [f"{seconds:7.1f} s  {name}" for seconds, name in ran[:number]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [layer.name for layer in LAYERS]
    parser.add_argument("layers", nargs="*", metavar="LAYER", help=f"one of: {', '.join(dict.fromkeys((*GROUPS, *names)))}")
    parser.add_argument("--all", action="store_true", help="slow layers and slow tests, too")
    args, extra = parser.parse_known_args()
    wanted = [name for given in args.layers for name in GROUPS.get(given, (given,))]
    if unknown := set(wanted) - set(names):
        parser.error(f"unknown layer {', '.join(sorted(unknown))}; there are: {', '.join(names)}")
    if missing := forgotten():
        parser.error(f"no layer runs {', '.join(missing)}: name it in LAYERS")
    signal.signal(signal.SIGTERM, end)
    layers = [layer for layer in LAYERS if (layer.name in wanted if wanted else args.all or not layer.slow)]
    began = time.time()
    took = Durations(cache_root() / f"test{'-all' if args.all else ''}-durations.json")
    results = run_all(layers, extra if args.all else ["-m", "not slow", *extra], took)
    print("\n".join(["the slowest tests:", *slowest(began), ""]))
    for name, run in results.items():
        print(f"{'ok  ' if run.status == 0 else 'FAIL'} {name:15s} {run.summary}; {clock(run.cpu)} of CPU")
    return 0 if all(run.status == 0 for run in results.values()) else 1


def run_all(layers: Sequence[Layer], extra: Sequence[str], durations: Durations) -> dict[str, Run]:
    """How each layer ended. What a layer printed that ran beside the others follows at the end."""
    started, results, screen = time.monotonic(), dict[str, Run](), sys.stdout.buffer
    beside = [layer for layer in layers if layer.beside and len(layers) > 1]
    row = [layer for layer in layers if layer not in beside]
    sys.stdout.flush()

    def run(layer: Layer, output: IO[bytes]) -> None:
        begun = time.monotonic()
        results[layer.name] = run_layer(layer, extra, output)
        if results[layer.name].status == 0:
            durations.record(layer.name, time.monotonic() - begun)
        if output is not screen:
            say(screen, f"\n==> {layer.name}, beside the others: {results[layer.name].summary}")

    with ThreadPoolExecutor(1) as executor, tempfile.TemporaryFile() as aside:
        running = [executor.submit(run, layer, aside) for layer in beside]
        if beside:
            say(screen, f"==> beside the other layers, at low priority: {', '.join(layer.name for layer in beside)}")
        for index, layer in enumerate(row):
            left = sum(durations.expected(later.name, later.seconds) for later in row[index:])
            say(
                screen,
                f"\n==> layer {index + 1}/{len(row)} {layer.name}: about {clock(durations.expected(layer.name, layer.seconds))}; "
                f"elapsed {clock(time.monotonic() - started)}, about {clock(left)} left",
            )
            run(layer, screen)
        if beside:
            say(screen, f"\n==> {', '.join(layer.name for layer in beside)}, beside the others:")
            for future in running:
                future.result()
            aside.seek(0)
            shutil.copyfileobj(aside, screen)
    say(screen, f"\n==> all layers done in {clock(time.monotonic() - started)}")
    return {layer.name: results[layer.name] for layer in layers}


if __name__ == "__main__":
    sys.exit(main())
