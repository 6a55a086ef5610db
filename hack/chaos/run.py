"""One run from start to verdict."""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hack.chaos.edits import Editor
from hack.chaos.epochs import EpochWatch
from hack.chaos.manifests import Edit, Wanted
from hack.chaos.operators import Operators
from hack.chaos.pods import Kubelet
from hack.chaos.snapshot import Snapshot, differences, equal, everything, snapshot
from hack.chaos.weather import Weather
from hack.cluster.controlplane import ControlPlane
from hack.durations import clock
from hack.waiting import eventually, poll
from tests.cluster.fault_proxy import FaultProxy, is_write
from tests.cluster.fence_engines import Service
from tests.cluster.operator_harness import Namespace, OperatorProcess

PROGRESS_SECONDS = 10.0
QUIET_SECONDS = 4.0
"""Longer than the longest lease, after which a new hub knows everybody, and than the wait of a new engine for its pool."""
CONVERGED_SECONDS = 150.0
"""Backoffs last up to half a minute, requests without an answer ten seconds; a whole LIST comes only each five minutes."""
MAX_SHOWN = 40

Say = Callable[[str], None]


@dataclass(frozen=True)
class Verdict:
    """What came out: lines for people, and problems; none when all is well."""

    lines: tuple[str, ...]
    problems: tuple[str, ...]
    edits: int
    faults: int
    kills: int
    epochs: int


@dataclass
class Run:
    """What one run is made of."""

    space: Namespace
    operators: Operators
    weather: Weather
    kubelet: Kubelet
    epochs: EpochWatch
    editor: Editor
    say: Say
    edits: int = 0

    def storm(self, seconds: float) -> None:
        """Edits under faults."""
        began = shown = time.monotonic()
        for edit in self.editor.first():
            self._do(edit)
        self.operators.trouble()
        while (elapsed := time.monotonic() - began) < seconds:
            for edit in self.editor.next():
                self._do(edit)
                time.sleep(self.editor.pause_seconds())
            if time.monotonic() - shown >= PROGRESS_SECONDS:
                shown = time.monotonic()
                faults, kills = sum(self.weather.counts.values()), sum(self.operators.counts.values())
                left = clock(max(0.0, seconds - elapsed))
                self.say(f"  {clock(elapsed)}: {self.edits} edits, {faults} faults, {kills} ends of operators; {left} of faults left")

    def calm(self) -> None:
        """No fault any more, and every pod well."""
        self.weather.stop()
        self.operators.calm()
        self.kubelet.heal()
        self.epochs.leave()

    def _do(self, edit: Edit) -> None:
        apply_edit(self.space, edit)
        self.edits += 1


def apply_edit(space: Namespace, edit: Edit) -> None:
    """Carry one edit out, as an administrator does whom no fault hits.

    Raises:
        AssertionError, OSError: it was refused: the edit was not valid.
    """
    path = f"{edit.collection.format(space.name)}/{edit.name}"
    if edit.verb == "apply":
        space.plane.api.apply(path, edit.body)
        return
    method, body = ("PATCH", edit.body) if edit.verb == "patch child" else ("DELETE", {"propagationPolicy": "Background"})
    content_type = edit.content_type if method == "PATCH" else "application/json"
    status, answer = space.plane.api.request(method, path, body, content_type, 15)
    # A child may be missing, or without the field that a patch replaces.
    tolerated = (404, 409, 422) if edit.verb.endswith("child") else ()
    assert status < 300 or status in tolerated, f"{edit.what}: {status} {answer.decode(errors='replace')[:800]}"


def chaos(plane: ControlPlane, folder: Path, name: str, seconds: float, seed: int, say: Say) -> Verdict:
    """Run faults for so many seconds on namespaces that begin with `name`, and compare with a fresh install of the final manifests."""
    folder.mkdir(parents=True, exist_ok=True)
    space, editor = Namespace.create_in(plane, f"{name}-live"), Editor(seed)
    ports: list[Operators] = []
    with contextlib.ExitStack() as stack:
        service = stack.enter_context(Service(lambda: ports[0].hub_port() if ports else None))
        operators = stack.enter_context(Operators(plane, space.name, folder, lambda: service.endpoint, seed))
        ports.append(operators)
        kubelet = stack.enter_context(Kubelet(space, seed))
        epochs = stack.enter_context(EpochWatch(space, service.endpoint))
        eventually(lambda: operators.leader, operators.tails, 90)
        weather = stack.enter_context(Weather(tuple(member.proxy for member in operators.members), seed))
        for member in operators.members:
            member.note(member.proxy.decide)
        run = Run(space, operators, weather, kubelet, epochs, editor, say)
        run.storm(seconds)
        say("  the faults end; a fresh install of the final manifests is made beside it")
        run.calm()
        healed = time.monotonic()
        wanted = fresh(plane, folder, f"{name}-fresh", editor.wanted, service.endpoint)
        problems = compared(folder, space, wanted, operators)
        took = time.monotonic() - healed
        if not problems:
            problems = idle_writes(plane, folder, space, operators, service.endpoint)
        problems += epochs.problems[:MAX_SHOWN] + operators.problems + operators.crashes()
        faults = sum(weather.counts.values())
        kills = sum(operators.counts.values())
        lines = (
            f"edits {run.edits}; pods {sum(kubelet.counts.values())}; states of epochs looked at {epochs.looked}, adopted {epochs.adopted}",
            f"faults {faults}: {_counted(weather.counts)}",
            f"operators: {_counted(operators.counts)}",
            f"{len(wanted)} objects compared, {len(problems)} problems, {took:.0f} s after the last fault",
        )
        return Verdict(lines, tuple(problems), run.edits, faults, kills, epochs.published)


def fresh(plane: ControlPlane, folder: Path, name: str, wanted: Wanted, endpoint: str) -> Snapshot:
    """What an operator that never knew anything else makes of the manifests, in a namespace of its own."""
    space = Namespace.create_in(plane, name)
    with OperatorProcess(plane, name, folder, hub_endpoint=endpoint) as operator, Kubelet(space, 0, healed=True):
        operator.wait_ready()
        for collection, obj in wanted.manifests():
            plane.api.apply(f"{collection.format(name)}/{obj['metadata']['name']}", obj)
        until = time.monotonic() + CONVERGED_SECONDS
        while time.monotonic() < until:
            trouble = changes(space)
            if not trouble:
                found = snapshot(space)
                trouble = list(ailing(found))
            if not trouble:
                return found
    raise TimeoutError(f"the fresh install does not come to rest: {'; '.join(trouble)}; log:\n{operator.tail(100)}")


def ailing(found: Snapshot) -> Iterator[str]:
    """Whose pods are not all ready, as far as statuses tell: controllers on a busy machine stand still for longer than `changes` waits."""
    for key, obj in found.items():
        spec, status = obj.get("spec", {}), obj.get("status") or {}
        if key.startswith("inferenceengines/") and status.get("readyReplicas") != spec["replicas"]:
            yield f"{key} lacks ready pods"
        mooncake = (spec.get("distributed") or {}).get("mooncake") if key.startswith("kvcachepools/") else None
        for part in ("master", "store") if mooncake else ():
            if status.get(part, {}).get("readyReplicas") != mooncake[part]["replicas"]:
                yield f"{key} lacks ready pods of its {part}"


def changes(space: Namespace) -> list[str]:
    """The first objects that change within a while; none when the namespace is at rest."""
    before, until = space.versions(), time.monotonic() + QUIET_SECONDS
    while time.monotonic() < until:
        time.sleep(0.5)
        if (now := space.versions()) != before:
            return [f"{key} changes" for key in sorted(now.keys() | before.keys()) if now.get(key) != before.get(key)]
    return []


def compared(folder: Path, space: Namespace, wanted: Snapshot, operators: Operators) -> list[str]:
    """Where the namespace still differs after all the time that it is given."""
    if poll(lambda: equal(space, wanted), CONVERGED_SECONDS, 1.0):
        return []
    found = list(differences(snapshot(space), wanted))
    (folder / "differs.json").write_text(json.dumps(everything(space), indent=1))
    shown = [f"differs from a fresh install: {line}" for line in found[:MAX_SHOWN]]
    return [*shown, f"{len(found)} differences; the objects are in {folder / 'differs.json'}, the logs beside it"]


def idle_writes(plane: ControlPlane, folder: Path, space: Namespace, operators: Operators, endpoint: str) -> list[str]:
    """What an operator writes that starts now: nothing, or hashes and keys are not what it would make them."""
    writes: list[str] = []
    operators.dismiss()
    before = everything(space)
    # A hub sweeps only for an epoch that it has published itself. One that starts now says that it waits for engines.
    sweeping = [f"/{key}/status" for key, obj in before.items() if "Reclaiming" in str((obj.get("status") or {}).get("conditions"))]

    def note(method: str, path: str) -> None:
        if is_write(method, path) and not path.endswith(tuple(sweeping)):
            writes.append(f"{method} {path}")

    with FaultProxy(plane, folder) as proxy:
        proxy.decide = note
        with OperatorProcess(plane, space.name, folder, kubeconfig=proxy.kubeconfig, hub_endpoint=endpoint) as operator:
            operator.wait_ready()
            poll(lambda: bool(writes), QUIET_SECONDS)
    changed = differences(everything(space), before) if writes else ()
    return [f"an operator that starts afterwards writes: {write}" for write in (*writes, *changed)]


def _counted(counts: Counter[str]) -> str:
    def parts() -> Iterator[str]:
        yield from (f"{name} {number}" for name, number in counts.most_common())

    return ", ".join(parts()) or "none"
