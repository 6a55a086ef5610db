"""From nothing to a pool and engines that are Ready: images, models, cluster, chart, manifests. Every step may be repeated."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from hack import models
from hack.cluster import binaries, choose_provider
from hack.cluster.kind import KindCluster
from hack.cluster.provider import Provider
from hack.demo.journey import ENGINE, NAMESPACE, POOL, REFERENCE
from hack.demo.kube import DemoError, Json, Kube, condition
from hack.demo.volumes import ENV_CLAIM, provide_folder
from hack.images.builder import Builder
from hack.images.recipe import IMAGES, Image

ROOT = Path(__file__).resolve().parents[2]
MANIFESTS = ROOT / "config/demo"
SYSTEM = "epochkv-system"
LOADED = "epochkv.io/loaded-images"

Note = Callable[..., None]
"""Takes a text, and which part of a step says it where several run at once."""


@dataclass
class Setup:
    """Names and folders of one demo."""

    cluster: str = os.environ.get("EPOCHKV_CLUSTER", "epochkv")
    engine_venv: Path = Path(os.environ.get("EPOCHKV_ENGINE_VENV") or ROOT / ".build/venv-engine")

    @property
    def provider(self) -> Provider:
        """The cluster's provider, chosen by `$CLUSTER`."""
        return choose_provider(self.cluster)

    @property
    def work(self) -> Path:
        """Where this demo keeps its files."""
        return ROOT / ".build/demo" / self.cluster

    @property
    def models(self) -> Path:
        """Folder with the tiny model and its new weights, mounted into the engines."""
        return self.work / "models"

    def kube(self) -> Kube:
        return Kube(self.provider.kubeconfig(), binaries.find("kubectl"))

    # -- steps ---------------------------------------------------------------------------------------------------------

    def prepare(self, note: Note) -> list[Path]:
        """What takes minutes from empty caches, side by side: Go compiles while packages and images are downloaded. Archives of the images.

        With kind whose images can be pulled, PATH may have kind, kubectl and Helm, and Docker builds our images.
        """
        python, provider = sys.executable, self.provider
        kind = provider if isinstance(provider, KindCluster) else None
        pulls = kind is not None and kind.pulls()
        commands = {} if "EPOCHKV_ENGINE_VENV" in os.environ else {"vLLM": [str(ROOT / "hack/setup.sh"), "engine"]}
        if not (pulls and all(map(shutil.which, ("kind", "kubectl", "helm")))):
            commands["binaries"] = [python, "-m", "hack.cluster", "build", *(["kind"] if kind else [])]
        if not pulls:
            commands["images"] = [python, "-m", "hack.images", "build"]
        side_by_side(commands, note)
        return [self._docker_build(image, note) for image in IMAGES] if pulls else Builder(note).ensure(IMAGES)

    def _docker_build(self, image: Image, note: Note) -> Path:
        note(f"docker build {image.reference}")
        target = ["--target", image.target] if image.target else []
        _docker("build", *target, "--tag", image.reference, "--file", str(ROOT / image.dockerfile), str(ROOT))
        self.work.mkdir(parents=True, exist_ok=True)
        digest = _docker("image", "inspect", "--format", "{{.Id}}", image.reference).strip().split(":")[-1][:12]
        archive = self.work / f"{image.name}-{digest}.tar"
        if not archive.exists():
            _docker("save", "--output", str(archive), image.reference)
        return archive

    def make_models(self, note: Note) -> None:
        for name, seed in (("base", 1), ("new", 2)):
            models.make(self.models / name, seed)

    def bring_up(self, note: Note) -> None:
        self.provider.up(note, [self.models, self.engine_venv])

    def load_images(self, archives: list[Path], note: Note) -> None:
        """Into the node, unless they are there; pods of older images are replaced."""
        kube = self.kube()
        wanted = " ".join(path.stem for path in archives)
        kube.kubectl("apply", "-f", "-", stdin=f"apiVersion: v1\nkind: Namespace\nmetadata: {{name: {SYSTEM}}}\n")
        annotations = kube.get(f"/api/v1/namespaces/{SYSTEM}")["metadata"].get("annotations") or {}
        loaded = annotations.get(LOADED)
        if loaded == wanted:
            note("the node has these images")
            return
        self.provider.load_images(archives, note)
        for namespace in (SYSTEM, NAMESPACE) if loaded else ():
            note(f"images have changed: replacing the pods in {namespace}")
            kube.kubectl("-n", namespace, "delete", "pods", "--all", "--ignore-not-found", "--wait=true")
        kube.kubectl("annotate", "namespace", SYSTEM, "--overwrite", f"{LOADED}={wanted}")

    def install(self, note: Note, *values: str) -> None:
        """Install the chart, or upgrade it. `values`: `--set KEY=VALUE`, more than the demo's."""
        note("helm upgrade --install epochkv charts/epochkv --values config/demo/values.yaml --wait")
        chart = ("upgrade", "--install", "epochkv", str(ROOT / "charts/epochkv"), "--create-namespace")
        self.helm(*chart, "--values", str(MANIFESTS / "values.yaml"), *values, "--wait", "--timeout", "3m")

    def helm(self, *arguments: str) -> str:
        """What Helm printed. Raises `DemoError`."""
        command = [str(binaries.find("helm")), *arguments, "--namespace", SYSTEM, "--kubeconfig", str(self.provider.kubeconfig())]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode != 0:
            raise DemoError(f"helm {arguments[0]}: {done.stdout}{done.stderr.strip()}\n{self.diagnosis()}")
        return done.stdout

    def apply(self, note: Note) -> None:
        """Namespace, volumes, then the manifests that a user writes."""
        kube = self.kube()
        self._remove_other_demo(kube, note)
        kube.kubectl("apply", "-f", str(MANIFESTS / "namespace.yaml"))
        for claim, folder in ((ENV_CLAIM, self.engine_venv), ("models", self.models)):
            note(provide_folder(kube, NAMESPACE, claim, folder))
        for name in ("pool", "engine", "reference"):
            note(kube.kubectl("apply", "-f", str(MANIFESTS / f"{name}.yaml")))

    def _remove_other_demo(self, kube: Kube, note: Note) -> None:
        """The demo of another checkout: its volumes show folders of that one, and a volume's source cannot be changed."""
        ours = {str(folder.resolve()) for folder in (self.engine_venv, self.models)}
        volumes = json.loads(kube.kubectl("get", "pv", "-o", "json"))["items"]
        theirs = {
            volume["metadata"]["name"]: volume["spec"]["hostPath"]["path"]
            for volume in volumes
            if volume["spec"].get("claimRef", {}).get("namespace") == NAMESPACE and volume["spec"]["hostPath"]["path"] not in ours
        }
        if not theirs:
            return
        note(f"removing the demo of another checkout ({', '.join(sorted(theirs.values()))})")
        kube.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found", "--timeout=180s", seconds=200.0)
        kube.kubectl("delete", "pv", *theirs, "--ignore-not-found", "--timeout=60s")

    def wait_ready(self, note: Note, seconds: float = 600.0) -> None:
        """Until pool and engines are Ready; otherwise an error with their conditions."""
        kube, deadline = self.kube(), time.monotonic() + seconds
        objects = {f"kvp/{POOL}": "kvcachepools", f"ie/{ENGINE}": "inferenceengines", f"ie/{REFERENCE}": "inferenceengines"}
        while waiting := _not_ready(kube, objects):
            note("; ".join(f"{name}: {why}" for name, why in waiting.items()))
            if time.monotonic() > deadline:
                lines = "\n".join(f"  {name}: {why}" for name, why in waiting.items())
                raise DemoError(f"not Ready after {seconds:.0f} s:\n{lines}\n{self.diagnosis()}")
            time.sleep(1.0)
        kube.kubectl("-n", NAMESPACE, "wait", "--for=condition=Ready", *objects, "--timeout=30s")

    def remove(self, note: Note) -> None:
        """Everything the demo made, with either provider, apart from caches of downloads and builds."""
        provider, kind = self.provider, KindCluster(self.cluster)
        provider.down(note)
        if not isinstance(provider, KindCluster) and kind.folder.exists():
            kind.down(note)
        shutil.rmtree(self.work, ignore_errors=True)
        if self.work.parent.is_dir() and not any(self.work.parent.iterdir()):
            self.work.parent.rmdir()

    def diagnosis(self) -> str:
        """Pods, warnings and the operator's last lines: what one would look at first."""
        kube, parts = self.kube(), []
        for title, args in (
            ("pods", ("get", "pods", "-A", "-o", "wide")),
            ("warnings", ("get", "events", "-A", "--field-selector=type=Warning", "--sort-by=.lastTimestamp")),
            ("operator", ("-n", SYSTEM, "logs", "deployment/epochkv-operator", "--tail=15")),
        ):
            try:
                parts.append(f"-- {title}\n" + "\n".join(kube.kubectl(*args, seconds=20).splitlines()[-15:]))
            except DemoError as error:
                parts.append(f"-- {title}\n{error}")
        return "\n".join(parts)


def _not_ready(kube: Kube, objects: dict[str, str]) -> dict[str, str]:
    """Why each object is not Ready; empty when all are."""
    waiting = {}
    for name, plural in objects.items():
        obj = kube.get(f"/apis/epochkv.io/v1alpha1/namespaces/{NAMESPACE}/{plural}/{name.split('/')[1]}")
        ready = condition(obj, "Ready")
        if ready.get("status") != "True" or not _observed(obj):
            waiting[name] = f"{ready.get('reason', 'no status yet')}: {ready.get('message', '')}".strip(": ")
    return waiting


def _observed(obj: Json) -> bool:
    """The status speaks of the present spec."""
    return bool((obj.get("status") or {}).get("observedGeneration", 0) >= obj["metadata"]["generation"])


def side_by_side(commands: Mapping[str, Sequence[str]], note: Note) -> None:
    """Run commands at once; what they say on stderr are notes. When one fails, the others are ended, and its last lines are the error."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    processes = {
        name: subprocess.Popen(command, cwd=ROOT, text=True, start_new_session=True, **pipes) for name, command in commands.items()
    }

    def follow(name: str) -> None:
        process, lines = processes[name], []
        for line in process.stderr or ():
            lines.append(line.rstrip())
            note(line.removeprefix("==> "), name)
        if code := process.wait():
            raise DemoError(f"{name}: '{shlex.join(commands[name])}' failed (exit {code}):\n" + "\n".join(lines[-15:]))

    with ThreadPoolExecutor() as pool:
        running = [pool.submit(follow, name) for name in commands]
        try:
            for done in as_completed(running):
                done.result()
        finally:
            for process in processes.values():
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGINT)  # so that it cleans up
                    try:
                        process.wait(20.0)
                    except subprocess.TimeoutExpired:
                        os.killpg(process.pid, signal.SIGKILL)


def _docker(*args: str) -> str:
    done = subprocess.run(["docker", *args], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise DemoError(f"docker {args[0]}: {(done.stderr or done.stdout).strip()[-2000:]}")
    return done.stdout
