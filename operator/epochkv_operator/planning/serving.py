"""Which pods of a pool are in their Services: the readiness gate `epochkv.io/weights` of each, by `spec.serve`. Pure.

For a pod p with the gate, an engine instance r of it, and a fingerprint f:

    live(p)    of each rank, the live instance that started last, if it is of the present life of the engine's container
    n(f, w)    live instances of f that hold w
    W(f)       the weights that serve. Named: those that have the label or begin with the digits. `Converged`:
                 - the w with the largest n(f, w), if there is only one;
                 - of several, those that served before; once engines have differed for too long (`HubView.overdue`), or if those are not
                   among them, the ones that came last by a push; else those that served before, if any engine holds them; else none
    holds(p)   live(p) is not empty, and each r in it says weights that are in W(its fingerprint)
    new(p)     an instance in live(p), or the container, started after the gate was last written
    ahead(p)   `Converged`; what p holds beside W it took after W came to the first engine, and the push goes on: engines have not differed
               for too long, or p took it less than PUSH_SECONDS ago

The gate of p becomes, by the first line that fits:

    True       nothing is asked for (`Any`), or holds(p)
    open       nobody can tell: no hub for a lease; no report of p, or none that says its weights, for a lease in which its containers
               were ready; engines have differed for too long and W is none. Open is True, and with `strict` False
    as it is   one of these for a shorter time, or weights are being written; but False if new(p). Also while no engine holds the weights
               that are named, unless `strict`
    False      its gate is not True, or new(p)
    as it is   ahead(p)
    False      p holds other weights; but never so that of the pods of its Service that are ready but for the gate, less than half (rounded
               up) are ready with a gate that stays True. Of those that leave, as many stay as are missing: ready ones before others, the
               first by name. With `strict` none stays

So a push that goes engine by engine changes nothing until W moves to the new weights. Then those that hold the old ones leave, each once,
and come back with the new ones. A gate changes at most once for each change of what the pod holds or reports, of its instances, and of W:
nothing else turns a gate back to True.

W is kept in `status.servedWeights`: a restart with base weights ties two engines, and to the hub those that came last are the majority
then. A hub that has just begun to lead knows nobody: until each engine has had the time to be heard from, W stays as it was.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from epochkv_fence.protocol.pool import EngineView, is_called
from epochkv_operator.api.base import ANY, CONVERGED, ENGINE_LABEL, GATE, Serve, has_gate
from epochkv_operator.planning.context import PUSH_SECONDS, HubView, Json, Serving, Turn, short_id, timestamp
from epochkv_operator.planning.names import controller_of
from epochkv_operator.planning.workload import ended, is_ready

JOINED_ANNOTATION: Final = "epochkv.io/joined"
"""Of a pod that joined by its label: the engine's container."""
WORKER_LABEL: Final = "leaderworkerset.sigs.k8s.io/worker-index"
ANYTHING: Final = Serve()
CLOCKS_SECONDS: Final = 5.0
"""By which a node's clock and ours may differ."""
SECOND: Final = timedelta(seconds=1)
"""Times in a pod are whole seconds."""
UNSAID: Final = ("HubUnavailable", "NoMajority", "NotReporting", "WeightsUnknown")
"""Why nobody can tell whether a pod holds the weights."""
_TEXTS: Final = {
    "Holds": "its engines hold the weights that serve",
    "NotGated": "any weights may serve",
    "FailedOpen": "nobody can tell which weights its engines hold, and spec.serve.strict is false",
    "OtherWeights": "its engines hold other weights than those that serve: epochkv weights",
    "Unknown": "nobody can tell which weights its engines hold, and spec.serve.strict is true",
    "Starting": "an engine was started, and is not known to hold the weights that serve",
}


def gate_of(engine: Serve | None, pool: Serve | None) -> Serve:
    """What counts for an engine of a pool."""
    return engine or pool or ANYTHING


def serve_of(given: Json) -> Serve:
    """Of an object that nothing has checked yet: fields of a newer API are no reason to gate nothing."""
    return Serve.model_validate({name: given[name] for name in ("weights", "strict") if name in given})


def with_gate(spec: Json) -> Json:
    """The spec of a pod, with the gate."""
    return {**spec, "readinessGates": [*spec.get("readinessGates", ()), {"conditionType": GATE}]}


@dataclass(frozen=True)
class _Pod:
    """What counts of a pod. `ready_since`: its containers are; `views`: live(p)."""

    obj: Json
    serve: Serve
    group: str
    gate: Json
    ready_since: datetime | None
    views: tuple[EngineView, ...]
    new: bool

    @property
    def name(self) -> str:
        return str(self.obj["metadata"]["name"])

    @property
    def uid(self) -> str:
        return str(self.obj["metadata"]["uid"])

    @property
    def open(self) -> bool:
        return self.gate.get("status") == "True"


@dataclass(frozen=True)
class _Verdict:
    """`status` None: as it is; `leaves`: False, if enough stay. `wait`: it may be another one after so many seconds."""

    status: bool | None
    reason: str = ""
    leaves: bool = False
    wait: float | None = None


_AS_IT_IS: Final = _Verdict(None)


def serving(
    pods: Iterable[Json],
    default: Serve,
    overrides: Mapping[str, Serve],
    hub: HubView | None,
    before: Mapping[str, str],
    lease_seconds: float,
    now: datetime,
    away_seconds: float = 0.0,
) -> Serving | None:
    """Look at the gates of a pool; None: it has none, and none is asked for.

    Args:
        pods: of the pool.
        default, overrides: what the pool asks for, and what each engine asks for that has a `serve` of its own.
        before: W, as it was.
        away_seconds: for how long no hub has led the pool.
    """
    pods = list(pods)
    if default.weights == ANY and all(one.weights == ANY for one in overrides.values()) and not any(map(has_gate, pods)):
        return None
    views = _by_pod(pods, hub.engines if hub is not None else ())
    seen = [_pod(pod, default, overrides, views, now) for pod in pods if _counts(pod)]
    return _Look(seen, hub, before, lease_seconds, now, away_seconds).result(default, overrides)


class _Look:
    def __init__(
        self, pods: Sequence[_Pod], hub: HubView | None, before: Mapping[str, str], lease: float, now: datetime, away: float
    ) -> None:
        self._pods, self._hub, self._lease, self._now, self._away = pods, hub, lease, now, away
        self._live = [view for view in hub.engines if view.alive and view.weights is not None] if hub is not None else []
        self._weights = converged(self._live, before, hub.overdue) if hub is not None and hub.complete else dict(before)
        self._came: dict[tuple[str, str], float] = {}
        for view in self._live:
            place = view.fingerprint, _hex(view)
            self._came[place] = max(view.weights_since, self._came.get(place, 0.0))

    def result(self, default: Serve, overrides: Mapping[str, Serve]) -> Serving:
        verdicts = [(pod, self._judge(pod)) for pod in self._pods]
        stays = self._stay(verdicts)
        verdicts = [(pod, _AS_IT_IS if pod.uid in stays else verdict) for pod, verdict in verdicts]
        turns = [turn for pod, verdict in verdicts if (turn := self._turn(pod, verdict)) is not None]
        unsaid: dict[str, list[str]] = defaultdict(list)
        for pod, verdict in verdicts:
            if verdict.reason in UNSAID:
                unsaid[verdict.reason].append(pod.name)
        asked = [default, *overrides.values()]
        named = dict.fromkeys(serve.weights for serve in asked if serve.weights not in (ANY, CONVERGED))
        absent = tuple(name for name in named if not self._named(name)) if self._hub is not None and self._hub.complete else ()
        served = sorted(self._weights.values()) if any(serve.weights == CONVERGED for serve in asked) else []
        served += [weights for name in named for weights in self._named(name)]
        return Serving(
            serves=tuple(dict.fromkeys(map(self._called, served))),
            turns=tuple(turns),
            held=tuple((pod.name, self._held(pod)) for pod, verdict in verdicts if verdict.reason == "OtherWeights"),
            stays=tuple(sorted(pod.name for pod in self._pods if pod.uid in stays)),
            unsaid={reason: tuple(sorted(names)) for reason, names in unsaid.items()},
            absent=absent,
            strict=any(serve.strict for serve in asked),
            weights=self._weights if any(serve.weights == CONVERGED for serve in asked) else {},
            look_again=min((verdict.wait for _, verdict in verdicts if verdict.wait is not None), default=None),
        )

    # ---- the rule ----

    def _judge(self, pod: _Pod) -> _Verdict:
        serve = pod.serve
        if serve.weights == ANY:
            return _Verdict(True, "NotGated")
        if self._hub is None:
            return self._unsaid(pod, "HubUnavailable", self._lease - self._away)
        wanted = {view.fingerprint: self._wanted(serve, view.fingerprint) for view in pod.views}
        if not pod.views or any(view.weights is None for view in pod.views):
            return self._silent(pod, self._hub)
        if serve.weights == CONVERGED and not all(wanted.values()):
            return self._unsaid(pod, "NoMajority", 0.0 if self._hub.overdue else None)
        apart = [view for view in pod.views if _hex(view) not in wanted[view.fingerprint]]
        if not apart:
            return _Verdict(None if any(view.updating for view in pod.views) else True, "Holds")
        return self._judge_others(pod, apart, wanted)

    def _judge_others(self, pod: _Pod, apart: Sequence[EngineView], wanted: Mapping[str, frozenset[str]]) -> _Verdict:
        """The pod is known to hold others."""
        serve, serves = pod.serve, pod.open and not pod.new
        if serve.weights == CONVERGED:
            left = self._ahead(apart, wanted) if serves else None
            return _Verdict(None, wait=left) if left is not None else _Verdict(False, "OtherWeights", leaves=serves and not serve.strict)
        if self._named(serve.weights) or serve.strict or (pod.open and pod.new):
            return _Verdict(False, "OtherWeights", leaves=serves and not serve.strict)
        return _AS_IT_IS

    def _silent(self, pod: _Pod, hub: HubView) -> _Verdict:
        """Engines of the pod do not report, or not their weights."""
        ready = self._seconds_since(pod.ready_since)
        if not pod.views:
            return self._unsaid(pod, "NotReporting", self._lease - ready if hub.complete and pod.ready_since is not None else None)
        silent = [view.weights_since for view in pod.views if view.weights is None and not view.updating]
        # While a pod starts, it is no loss that its weights are not known yet.
        return self._unsaid(
            pod, "WeightsUnknown", self._lease - min(ready, max(silent)) if silent and pod.ready_since is not None else None
        )

    def _unsaid(self, pod: _Pod, why: str, left: float | None) -> _Verdict:
        """Nobody can tell what the pod holds. `left`: how much longer it may stay so; None: until there is news."""
        if left is not None and left <= 0:
            return _Verdict(not pod.serve.strict, why)
        return _Verdict(False, "Starting", wait=left) if pod.open and pod.new else _Verdict(None, wait=left)

    def _wanted(self, serve: Serve, fingerprint: str) -> frozenset[str]:
        if serve.weights != CONVERGED:
            return self._named(serve.weights)
        return frozenset(self._weights[one] for one in (fingerprint,) if one in self._weights)

    def _named(self, name: str) -> frozenset[str]:
        groups = self._hub.weights if self._hub is not None else ()
        return frozenset(group.id for group in groups if is_called(group.id, group.label, name))

    def _ahead(self, apart: Sequence[EngineView], wanted: Mapping[str, frozenset[str]]) -> float | None:
        """For how much longer the pod may be ahead (infinity: until there is news); None: it is not."""
        assert self._hub is not None
        for view in apart:
            came = [
                self._came[view.fingerprint, weights] for weights in wanted[view.fingerprint] if (view.fingerprint, weights) in self._came
            ]
            if came and view.weights_since >= max(came):
                return None
        left = PUSH_SECONDS - max(view.weights_since for view in apart)
        if left > 0:
            return left
        return None if self._hub.overdue else PUSH_SECONDS

    def _stay(self, verdicts: Sequence[tuple[_Pod, _Verdict]]) -> set[str]:
        """Those that would leave and have to stay, by uid."""
        groups: dict[str, list[tuple[_Pod, _Verdict]]] = defaultdict(list)
        for pod, verdict in verdicts:
            groups[pod.group].append((pod, verdict))
        found: set[str] = set()
        for members in groups.values():
            could = [(pod, verdict) for pod, verdict in members if pod.ready_since is not None]
            leave = [uid for _, _, uid in sorted((not is_ready(pod.obj), pod.name, pod.uid) for pod, verdict in could if verdict.leaves)]
            serve = sum(pod.open and verdict.status is not False and is_ready(pod.obj) for pod, verdict in could)
            found |= set(leave[: max(0, -(-len(could) // 2) - serve)])
        return found

    # ---- what is written and said ----

    def _turn(self, pod: _Pod, verdict: _Verdict) -> Turn | None:
        if verdict.status is None:
            return None
        reason = verdict.reason
        if reason in UNSAID:
            reason = "FailedOpen" if verdict.status else "Unknown"
        status = str(verdict.status)
        if (pod.gate.get("status"), pod.gate.get("reason")) == (status, reason) and not (verdict.status and pod.new):
            return None
        moved = self._now if pod.gate.get("status") != status else datetime.fromisoformat(pod.gate["lastTransitionTime"])
        condition = {"type": GATE, "status": status, "reason": reason, "message": _TEXTS[reason]}
        return Turn(pod.obj, {**condition, "lastProbeTime": timestamp(self._now), "lastTransitionTime": timestamp(moved)})

    def _seconds_since(self, moment: datetime | None) -> float:
        return (self._now - moment).total_seconds() if moment is not None else 0.0

    def _held(self, pod: _Pod) -> str:
        return ", ".join(sorted({self._called(_hex(view)) for view in pod.views}))

    def _called(self, weights: str) -> str:
        label = next((group.label for group in (self._hub.weights if self._hub is not None else ()) if group.id == weights), "")
        return f"{short_id(weights)} ({label})" if label else short_id(weights)


def converged(live: Iterable[EngineView], before: Mapping[str, str], overdue: bool) -> dict[str, str]:
    """W of each fingerprint, of live engines that say their weights."""
    holders: dict[str, dict[str, list[EngineView]]] = defaultdict(lambda: defaultdict(list))
    for view in live:
        holders[view.fingerprint][_hex(view)].append(view)
    found = {kind: _served(held, before.get(kind), overdue) for kind, held in holders.items()}
    return {kind: weights for kind, weights in sorted(found.items()) if weights is not None}


def _served(held: Mapping[str, Sequence[EngineView]], before: str | None, overdue: bool) -> str | None:
    most = max(map(len, held.values()))
    top = sorted(weights for weights, views in held.items() if len(views) == most)
    if len(top) == 1:
        return top[0]
    if before in top and not overdue:
        return before
    came = [(view.weights_since, weights) for weights in top for view in held[weights] if view.pushed]
    if came:
        return min(came)[1]
    return before if before in held else None


# ---- from the objects of a cluster ----


Place = tuple[str, str]
"""Namespace and name of a pod."""


def _counts(pod: Json) -> bool:
    return has_gate(pod) and pod["metadata"].get("deletionTimestamp") is None and not ended(pod)


def _pod(pod: Json, default: Serve, overrides: Mapping[str, Serve], views: Mapping[Place, Sequence[EngineView]], now: datetime) -> _Pod:
    metadata, conditions = pod["metadata"], (pod.get("status") or {}).get("conditions") or []
    engine = (metadata.get("labels") or {}).get(ENGINE_LABEL)
    found = {condition["type"]: condition for condition in conditions}
    gate, ready = found.get(GATE, {}), found.get("ContainersReady", {})
    since, latest = _started(pod, now), _latest(views.get(_place(pod), ()), now)
    if since is not None:
        latest = {place: view for place, view in latest.items() if _start(view, now) >= since - timedelta(seconds=CLOCKS_SECONDS)}
    written = gate.get("lastProbeTime") or gate.get("lastTransitionTime")
    new = False
    if written:
        at = datetime.fromisoformat(written)
        new = any(_start(view, now) > at + SECOND for view in latest.values())
        new = new or (not latest and since is not None and since > at + timedelta(seconds=CLOCKS_SECONDS))
    return _Pod(
        obj=pod,
        serve=overrides.get(str(engine), default) if engine else default,
        group=engine or str(controller_of(pod).get("uid", "")),
        gate=gate,
        ready_since=datetime.fromisoformat(ready["lastTransitionTime"]) if ready.get("status") == "True" else None,
        views=tuple(latest.values()),
        new=new,
    )


def _place(pod: Json) -> Place:
    return pod["metadata"]["namespace"], pod["metadata"]["name"]


def _by_pod(pods: Sequence[Json], engines: Iterable[EngineView]) -> dict[Place, list[EngineView]]:
    """Live instances by the pod that has the gate: of several nodes, the first one, after which LeaderWorkerSet names the others."""
    leaders = {
        _place(pod): (pod["metadata"]["namespace"], pod["metadata"]["name"].rsplit("-", 1)[0])
        for pod in pods
        if (pod["metadata"].get("labels") or {}).get(WORKER_LABEL, "0") != "0"
    }
    by_name = {pod["metadata"]["name"]: _place(pod) for pod in pods}  # of an engine that does not know its namespace
    found: dict[Place, list[EngineView]] = defaultdict(list)
    for view in engines:
        if view.pod and view.alive:
            place = (view.namespace, view.pod) if view.namespace else by_name.get(view.pod, ("", view.pod))
            found[leaders.get(place, place)].append(view)
    return found


def _latest(views: Iterable[EngineView], now: datetime) -> dict[tuple[str, int], EngineView]:
    """Of each rank, the instance that started last: the one before lives on for a lease."""
    found: dict[tuple[str, int], EngineView] = {}
    for view in sorted(views, key=lambda view: (_start(view, now), view.instance)):
        found[view.pod, view.rank] = view
    return found


def _start(view: EngineView, now: datetime) -> datetime:
    return now - timedelta(seconds=view.age_seconds + view.silent_seconds)


def _started(pod: Json, now: datetime) -> datetime | None:
    """When the engine's container was started; now, while it does not run. None: nobody says, or it is not known which one it is."""
    containers: list[Any] = (pod.get("status") or {}).get("containerStatuses") or []
    name = (pod["metadata"].get("annotations") or {}).get(JOINED_ANNOTATION, "engine")
    found = next((one for one in containers if one.get("name") == name), containers[0] if len(containers) == 1 else None)
    if found is None:
        return None
    running = (found.get("state") or {}).get("running")
    return datetime.fromisoformat(running["startedAt"]) if running and running.get("startedAt") else now


def _hex(view: EngineView) -> str:
    assert view.weights is not None
    return view.weights.hex()
