"""Go binaries of the local cluster: built from the pinned modules in `tools/`, cached by the hash of what they are built from.

Kubernetes publishes no binaries in any package registry, but the Go module proxy serves its source. So everything is
built here once, in about ten minutes on two cores, and kept under the cache folder of the user.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hack.cluster.provider import ClusterError

TOOLS = Path(__file__).parent / "tools"
KUBERNETES_VERSION = "v1.34.4"
_VERSION_PACKAGE = "k8s.io/component-base/version"
_KUBERNETES_LDFLAGS = "-s -w " + " ".join(
    f"-X {_VERSION_PACKAGE}.{key}={value}"
    for key, value in {
        "gitVersion": KUBERNETES_VERSION,
        "gitMajor": KUBERNETES_VERSION.lstrip("v").split(".")[0],
        "gitMinor": KUBERNETES_VERSION.split(".")[1],
        "gitTreeState": "clean",
        "gitCommit": "unknown",
        "buildDate": "1970-01-01T00:00:00Z",
    }.items()
)

Report = Callable[[str], None]


@dataclass(frozen=True)
class Module:
    """One Go module under `tools/`: which packages it builds into which binaries, how, and about how long a cold build takes.

    `checks`: no part of a cluster; tests check the alerts and the workflows with it.
    """

    name: str
    packages: dict[str, str]  # binary name -> Go package
    ldflags: str
    expected_seconds: int
    tags: str = ""
    checks: bool = False


MODULES = (
    Module("etcd", {"etcd": "go.etcd.io/etcd/server/v3"}, "-s -w", 30),
    Module(
        "kubernetes",
        {
            name: f"k8s.io/kubernetes/cmd/{name}"
            for name in (
                "kube-apiserver",
                "kube-controller-manager",
                "kube-scheduler",
                "kubelet",
                "kube-proxy",
                "kubectl",
            )
        },
        _KUBERNETES_LDFLAGS,
        330,
    ),
    Module("helm", {"helm": "helm.sh/helm/v3/cmd/helm"}, "-s -w", 80),
    Module("coredns", {"coredns": "github.com/coredns/coredns"}, "-s -w", 100),
    # The tag leaves out what finds targets in two dozen clouds.
    Module("prometheus", {"promtool": "github.com/prometheus/prometheus/cmd/promtool"}, "-s -w", 200, tags="remove_all_sd", checks=True),
    Module("actionlint", {"actionlint": "github.com/rhysd/actionlint/cmd/actionlint"}, "-s -w", 10, checks=True),
)


def cache_root() -> Path:
    """`$EPOCHKV_CACHE`, else `$XDG_CACHE_HOME/epochkv`, else `~/.cache/epochkv`."""
    if explicit := os.environ.get("EPOCHKV_CACHE"):
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "epochkv"


def go_version() -> str:
    """The version of the Go toolchain on PATH, such as `go1.24.4`."""
    try:
        return subprocess.run(["go", "env", "GOVERSION"], check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        raise ClusterError(f"cannot run 'go env GOVERSION' ({error}): install Go 1.26 or newer to build the cluster's binaries") from error


def module_hash(name: str, version: str, tools: Path = TOOLS) -> str:
    """Twelve hex digits over go.mod, go.sum, tools.go of a module, its build flags and tags, and the Go version."""
    digest = hashlib.sha256()
    for part in ("go.mod", "go.sum", "tools.go"):
        data = (tools / name / part).read_bytes()
        digest.update(len(data).to_bytes(8, "big") + data)
    module = next(module for module in MODULES if module.name == name)
    digest.update(module.ldflags.encode() + b"\0" + version.encode() + module.tags.encode())
    return digest.hexdigest()[:12]


@dataclass(frozen=True)
class Binaries:
    """Where each binary lies. `folders` are what a PATH needs."""

    folders: tuple[Path, ...]

    def path(self, name: str) -> Path:
        """Full path of a binary; raises ClusterError with the fix when it has not been built."""
        for folder in self.folders:
            if (folder / name).is_file():
                return folder / name
        raise ClusterError(f"{name} is not built: run 'python -m hack.cluster build'")

    def missing(self) -> list[Module]:
        """Modules of which some binary is not there."""
        return [
            module for module in MODULES if any(not any((folder / name).is_file() for folder in self.folders) for name in module.packages)
        ]


def locate(cache: Path | None = None) -> Binaries:
    """The cache folders for the modules as they are now, whether built or not."""
    version = go_version()
    root = (cache or cache_root()) / "bin"
    return Binaries(tuple(root / f"{module.name}-{module_hash(module.name, version)}" for module in MODULES))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def build(report: Report = print, cache: Path | None = None, *, checks: bool = False) -> Binaries:
    """Build what is missing, one module after the other, those for checks on request; safe to call from several processes at once."""
    binaries = locate(cache)
    missing = [module for module in binaries.missing() if checks or not module.checks]
    if not missing:
        return binaries
    expected = sum(module.expected_seconds for module in missing)
    report(f"building {', '.join(module.name for module in missing)} (about {expected} s on 2 cores, once)")
    started = time.monotonic()
    for module, folder in zip(MODULES, binaries.folders, strict=True):
        if module not in missing:
            continue
        with _locked(folder.with_suffix(".lock")):
            if module in binaries.missing():
                _build_module(module, folder, report, started, expected)
    return binaries


def _build_module(module: Module, folder: Path, report: Report, started: float, expected: int) -> None:
    staging = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    log = staging / "build.log"
    try:
        for name, package in _build_steps(module):
            command = ["go", "build", "-trimpath", "-tags", module.tags, "-ldflags", module.ldflags, "-o", f"{staging}/{name}", *package]
            _run_with_progress(command, TOOLS / module.name, log, module, report, started, expected)
        if folder.exists():
            shutil.rmtree(folder)
        staging.rename(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _build_steps(module: Module) -> list[tuple[str, list[str]]]:
    """One `go build` for all packages of a module where the binaries are named after them, else one for each."""
    if all(package.endswith("/" + name) for name, package in module.packages.items()):
        return [("", list(module.packages.values()))]
    return [(name, [package]) for name, package in module.packages.items()]


def _run_with_progress(command: list[str], cwd: Path, log: Path, module: Module, report: Report, started: float, expected: int) -> None:
    env = {**os.environ, "GOFLAGS": "-buildvcs=false -mod=readonly", "GOTOOLCHAIN": "local"}
    with log.open("ab") as output:
        process = subprocess.Popen(command, cwd=cwd, stdout=output, stderr=subprocess.STDOUT, env=env)
        while True:
            try:
                code = process.wait(timeout=15)
                break
            except subprocess.TimeoutExpired:
                report(f"  {module.name}: {time.monotonic() - started:.0f} s of about {expected} s")
            except BaseException:
                process.terminate()
                process.wait()
                raise
    if code != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise ClusterError(f"building {module.name} failed (exit {code}) in {cwd}:\n{tail}")
    report(f"  {module.name}: built after {time.monotonic() - started:.0f} s of about {expected} s")
