"""Go binaries of the local cluster: built from the pinned modules in `tools/`, cached by the hash of what they are built from.

Kubernetes publishes no binaries in any package registry, but the Go module proxy serves its source. So everything is built here once and
kept under the cache folder of the user. Components, kubectl and Helm are one module, as most of their packages are the same.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hack.cluster.provider import ClusterError
from hack.durations import clock

TOOLS = Path(__file__).parent / "tools"
KUBERNETES_VERSION = "v1.37.2"


def _versions(kubernetes: str) -> str:
    """Flags of the linker that tell the programs which version they are."""
    major, minor, _ = kubernetes.lstrip("v").split(".")
    values = {
        "k8s.io/component-base/version.gitVersion": kubernetes,
        "k8s.io/component-base/version.gitMajor": major,
        "k8s.io/component-base/version.gitMinor": minor,
        "k8s.io/component-base/version.gitTreeState": "clean",
        # Which cluster `helm template` renders for.
        "helm.sh/helm/v3/pkg/chartutil.k8sVersionMajor": major,
        "helm.sh/helm/v3/pkg/chartutil.k8sVersionMinor": minor,
    }
    return " ".join(f"-X {key}={value}" for key, value in values.items())


Report = Callable[[str], None]


@dataclass(frozen=True)
class Module:
    """One Go module under `tools/`: which packages make which programs, by which other names these are called, and how long it takes.

    `checks`: no part of a local cluster; tests need it (alerts, workflows, groups of pods), or kind does.
    """

    name: str
    packages: tuple[str, ...]  # each makes a program that is called as the package is
    expected_seconds: int  # on two cores, with nothing cached
    ldflags: str = ""
    tags: str = ""
    names: tuple[str, ...] = ()  # more of its first program: of many in one, it is the one that it is called by
    checks: bool = False

    @property
    def programs(self) -> tuple[str, ...]:
        """What is in the module's folder once it is built."""
        return (*(self.name if package == "." else package.rpartition("/")[2] for package in self.packages), *self.names)


MODULES = (
    Module(
        "cluster",
        (".", "./pause", "helm.sh/helm/v3/cmd/helm"),
        360,
        _versions(KUBERNETES_VERSION),
        names=(
            "coredns", "etcd", "kube-apiserver", "kube-controller-manager", "kube-proxy", "kube-scheduler", "kubectl", "kubelet",
        ),
    ),
    # The tag leaves out what finds targets in two dozen clouds.
    Module("prometheus", ("github.com/prometheus/prometheus/cmd/promtool",), 200, tags="remove_all_sd", checks=True),
    Module("actionlint", ("github.com/rhysd/actionlint/cmd/actionlint",), 10, checks=True),
    Module("gitops", (".",), 120, checks=True),  # what Flux and Argo CD make of an object
    Module("lws", ("sigs.k8s.io/lws/cmd",), 170, names=("lws",), checks=True),  # the controller of LeaderWorkerSets
    # A node of kind is made from the first module, too; kube-router is the network of its pods.
    Module(
        "kind",
        (
            "sigs.k8s.io/kind",
            "k8s.io/kubernetes/cmd/kubeadm",
            "github.com/cloudnativelabs/kube-router/v2/cmd/kube-router",
            "./coredns",
        ),
        240,
        _versions(KUBERNETES_VERSION),
        checks=True,
    ),
)  # fmt: skip


def _modules() -> tuple[Module, ...]:
    """All of them; `$EPOCHKV_KUBERNETES`, such as v1.35.4, puts the API server and the controller manager of that version first."""
    version = os.environ.get("EPOCHKV_KUBERNETES")
    if not version:
        return MODULES
    packages = ("k8s.io/kubernetes/cmd/kube-apiserver", "k8s.io/kubernetes/cmd/kube-controller-manager")
    return (Module(f"kubernetes-{version}", packages, 300, _versions(version)), *MODULES)


def cache_root() -> Path:
    """`$EPOCHKV_CACHE`, else `$XDG_CACHE_HOME/epochkv`, else `~/.cache/epochkv`."""
    if explicit := os.environ.get("EPOCHKV_CACHE"):
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "epochkv"


def go_version() -> str:
    """The version of the Go toolchain on PATH, such as `go1.26.4`."""
    try:
        return subprocess.run(["go", "env", "GOVERSION"], check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        raise ClusterError(f"cannot run 'go env GOVERSION' ({error}): install Go 1.26.7 or newer to build the binaries") from error


def module_hash(module: Module, version: str, tools: Path = TOOLS) -> str:
    """Twelve hex digits over the files of a module, how it is built, and the Go version."""
    digest = hashlib.sha256(f"{module}\0{version}".encode())
    for path in sorted((tools / module.name).rglob("*")):
        if path.is_file():
            digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
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
        module = next((f" {module.name}" for module in MODULES if module.checks and name in module.programs), "")
        raise ClusterError(f"{name} is not built: run 'python -m hack.cluster build{module}'")


def find(name: str) -> Path:
    """The program that is built, else the one on PATH; raises as `Binaries.path`."""
    try:
        return locate().path(name)
    except ClusterError:
        if (system := shutil.which(name)) is None:
            raise
        return Path(system)


def locate(cache: Path | None = None) -> Binaries:
    """The cache folders for the modules as they are now, whether built or not."""
    version = go_version()
    root = (cache or cache_root()) / "bin"
    return Binaries(tuple(root / f"{module.name}-{module_hash(module, version)}" for module in _modules()))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def build(report: Report = print, cache: Path | None = None, *, also: Collection[str] = ()) -> Binaries:
    """Build what is missing, one module after the other; safe to call from several processes at once.

    Args:
        also: modules that are no part of a cluster.
    """
    if unknown := set(also) - {module.name for module in MODULES}:
        raise ClusterError(f"no module {', '.join(sorted(unknown))}: one of {', '.join(module.name for module in MODULES)}")
    binaries = locate(cache)
    for module, folder in zip(_modules(), binaries.folders, strict=True):
        if folder.is_dir() or (module.checks and module.name not in also):
            continue
        with _locked(folder.with_suffix(".lock")):
            if not folder.is_dir():
                _build_module(module, folder, report)
    return binaries


def _build_module(module: Module, folder: Path, report: Report) -> None:
    staging = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        report(f"building {', '.join(module.programs)} (about {clock(module.expected_seconds)} on two cores, once)")
        _go_build(module, staging, report)
        for name in module.names:
            (staging / name).symlink_to(module.programs[0])
        staging.rename(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _go_build(module: Module, staging: Path, report: Report) -> None:
    """Download, compile and link. What is left is told by the packages that are left."""
    cwd, started = TOOLS / module.name, time.monotonic()
    # Without cgo no C compiler is needed, and the programs are static. Without what debuggers read, without inlining, and with a lazy
    # collector, compiling takes little more than half of the CPU.
    flags = "-buildvcs=false -trimpath '-gcflags=all=-dwarf=false -l'"
    env = {**os.environ, "GOFLAGS": f"{flags} -mod=readonly", "GOGC": "400", "GOTOOLCHAIN": "local", "CGO_ENABLED": "0"}
    if not cwd.is_dir():
        cwd = _unpinned(module.name.removeprefix("kubernetes-"), staging / "module", env)
        env["GOFLAGS"] = f"{flags} -mod=mod"
    listed = subprocess.run(
        ["go", "list", "-deps", "-tags", module.tags, *module.packages], cwd=cwd, env=env, capture_output=True, text=True, check=False
    )
    if listed.returncode != 0:
        raise ClusterError(f"the Go modules of {module.name} cannot be read or downloaded in {cwd}:\n{_tail(listed.stderr)}")
    total, compiling = len(listed.stdout.split()), time.monotonic()
    report(f"{module.name}: modules are there after {clock(compiling - started)}")
    arguments = ["-v", "-tags", module.tags, "-ldflags", f"-s -w {module.ldflags}", "-o", f"{staging}/"]
    log = staging / "build.log"  # a line for each package
    with log.open("wb") as output:
        process = subprocess.Popen(["go", "build", *arguments, *module.packages], cwd=cwd, stdout=output, stderr=subprocess.STDOUT, env=env)
        while True:
            try:
                code = process.wait(timeout=15)
                break
            except subprocess.TimeoutExpired:
                report(f"{module.name}: {_left(len(log.read_bytes().splitlines()), total, time.monotonic() - compiling)}")
            except BaseException:
                process.terminate()
                process.wait()
                raise
    if code != 0:
        raise ClusterError(f"building {module.name} failed (exit {code}) in {cwd}:\n{_tail(log.read_text(errors='replace'))}")
    report(f"{module.name}: built after {clock(time.monotonic() - started)}")


def _unpinned(version: str, folder: Path, env: dict[str, str]) -> Path:
    """A module of this version of Kubernetes, whose libraries are of the same version; Go itself writes the checksums."""
    command = ["go", "mod", "download", "-json", f"k8s.io/kubernetes@{version}"]
    answer = subprocess.run(command, cwd=TOOLS / "cluster", env=env, capture_output=True, text=True, check=False).stdout
    if not (file := json.loads(answer or "{}").get("GoMod")):
        raise ClusterError(f"Kubernetes {version} cannot be downloaded: {answer.strip()}")
    libraries = re.findall(r"^\t?(\S+) => \./staging/", Path(file).read_text(), re.MULTILINE)
    lines = [f"replace {name} => {name} v0.{version.partition('.')[2]}" for name in libraries]
    folder.mkdir()
    (folder / "go.mod").write_text("\n".join(["module older", "go 1.26.0", f"require k8s.io/kubernetes {version}", *lines, ""]))
    return folder


def _left(done: int, total: int, seconds: float) -> str:
    """How far `total` packages are after `seconds` of compiling."""
    if done >= total:
        return "linking"
    left = f", about {clock(seconds * (total - done) / done)} left" if done > total // 20 else ""
    return f"{done} of {total} packages{left}"


def _tail(text: str) -> str:
    return "\n".join(text.splitlines()[-15:])
