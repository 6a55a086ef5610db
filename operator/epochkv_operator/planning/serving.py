"""Which pods of a pool are in their Services: the readiness gate `epochkv.io/weights` of each, by `spec.serve`. Pure.

For a pod p with the gate, an engine instance r of it, and a kind k (a namespace and a fingerprint: guests do not vote for others):

    live(p)    of each engine and rank, the live instance that started last, if it was heard from since the life before was over: the
               container's, or that of a pod of the same name
    W(k)       the weights that serve. Named: those that have the label or begin with the digits. `Converged`:
                 - engines vote that were pushed to, or hold what served before. So while one does, W moves only by a push
                 - engines that are away vote for what served before, until one takes other weights by a push after they went. While
                   weights are being written, of those that hold others only those vote that took them in this push: less than PUSH_SECONDS
                   before the first call that goes on, or before another one that did
                 - where there are none: W of the fingerprint in the pool's own namespace. If it has none: if another kind of either
                   namespace has a W that came by a push, engines that hold it, or weights with its label; else all
                 - of the votes, the most. Of as many, those that served before; once no push goes on, or if those are not among them,
                   the ones that came last by a push; else none
    away       weights are being written, for less than AWAY_SECONDS; or it was pushed to, and sleeps, or does not know what it holds since
               less than PUSH_SECONDS
    a push     goes on in k while an engine of it takes weights, or was pushed to less than PUSH_SECONDS ago
    holds(p)   live(p) is not empty, and each r in it says weights that are in W(its kind)
    new(p)     the gate names engine instances, and not each in live(p). Where the gate names none, or live(p) is empty: that life was seen
               to be over, and the gate is still as it was then
    ahead(p)   `Converged`; what p holds beside W it took after W came to the first engine, if one holds W, and less than PUSH_SECONDS
               ago, or a push goes on

The gate of p becomes, by the first line that fits:

    True       nothing is asked for (`Any`, or p is no first pod of several and answers nobody), or holds(p)
    open       nobody can tell: no hub for a lease; no report of p, or none that says its weights, for a lease in which its containers
               were ready; W is none and p took its weights PUSH_SECONDS ago. Open is True, and with `strict` False
    as it is   one of these for a shorter time, or weights are being written; but False if new(p). Also while no engine holds the weights
               that are named, unless `strict`
    as it is   ahead(p), and its gate is True, and not new(p)
    False      p holds other weights

Without `strict`, no gate goes from True to False so that of the pods of a Service that are ready but for the gate, less than half (rounded
up) are ready with a gate that stays True. Of those that leave, as many stay as are missing: ready ones before others, the first by name.

So a push that goes engine by engine changes nothing until W moves to the new weights. Then those that hold the old ones leave, each once,
and come back with the new ones. A gate changes at most once for each change of what the pod holds or reports, of its instances, and of W:
nothing else turns a gate back to True.

W is kept in `status.servedWeights`, and whether an engine was pushed to is its own word: engines that merely start, however many, change
nothing. A hub that has just begun to lead knows nobody: until each engine has had the time to be heard from, W stays as it was.

Each gate that is written names live(p), so the next operator knows who is new. Times are compared on one clock, which is this process's
own and which nobody sets. A node's clock names the lives of a container, and no more.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import inf
from typing import Any, Final, NamedTuple

import msgspec

from epochkv_fence.protocol.pool import EngineView, called, is_called
from epochkv_operator.api.base import ANY, CONVERGED, ENGINE_LABEL, GATE, Serve, has_gate
from epochkv_operator.planning.context import PUSH_SECONDS, HubView, Json, Serving, Turn, timestamp
from epochkv_operator.planning.names import controller_of
from epochkv_operator.planning.workload import condition_of, ended, is_ready

JOINED: Final = "epochkv.io/joined"
"""Of a pod that joined by its label: the engine's container."""
WORKER_LABEL: Final = "leaderworkerset.sigs.k8s.io/worker-index"
ANYTHING: Final = Serve()
INSTANCES: Final = "; engine instances "
"""In the message of a gate: those that it was written for."""
AWAY_SECONDS: Final = 600.0
"""A call that writes weights for longer hangs."""
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


Place = tuple[str, str]
"""Namespace and name of a pod."""
Kind = tuple[str, str]
"""Namespace and fingerprint of engines."""


class Life(NamedTuple):
    """Of an engine's container, as this process has seen it on its own clock.

    Attributes:
        name: empty: it does not run, or nobody says.
        ready: since when the containers of the pod are; None: they are not.
        over: when the life before, or a pod of the same name, was seen to be over.
        gate: what it was then.
    """

    name: str
    ready: float | None = None
    over: float | None = None
    gate: Json | None = None


def serve_of(given: Json) -> Serve:
    """Of an object that nothing has checked yet: fields of a newer API are no reason to gate nothing."""
    return Serve.model_validate({name: given[name] for name in ("weights", "strict") if name in given})


class _Pod(NamedTuple):
    """What counts of a pod. `ready`: for how many seconds its containers are; `views`: live(p); `named`: whether its gate names them."""

    obj: Json
    name: str
    uid: str
    serve: Serve
    group: str
    gate: Json
    ready: float | None
    views: tuple[EngineView, ...]
    named: bool
    new: bool

    @property
    def open(self) -> bool:
        return self.gate.get("status") == "True"


class _Verdict(NamedTuple):
    """`status` None: as it is. `wait`: it may be another one after so many seconds."""

    status: bool | None
    reason: str = ""
    wait: float | None = None


def serving(
    pods: Iterable[Json],
    home: str,
    default: Serve,
    overrides: Mapping[str, Serve],
    hub: HubView | None,
    before: Mapping[Kind, str],
    lives: Mapping[str, Life],
    lease_seconds: float,
    now: datetime,
    clock: float,
    away_seconds: float = 0.0,
) -> Serving | None:
    """Look at the gates of a pool; None: it has none, and none is asked for.

    Args:
        pods: of the pool.
        home: the pool's namespace, and that of engines outside of Kubernetes.
        default, overrides: what the pool asks for, and what each engine asks for that has a `serve` of its own.
        before: W, as it was.
        lives: see `lives_of`.
        now: for what is written.
        clock: that of `lives`.
        away_seconds: for how long no hub has led the pool.
    """
    pods = list(pods)
    if default.weights == ANY and all(one.weights == ANY for one in overrides.values()) and not any(map(has_gate, pods)):
        return None
    views = _by_pod(pods, home, hub.engines if hub is not None else ())
    seen = [_pod(pod, home, default, overrides, views, lives, clock) for pod in pods if _counts(pod)]
    views |= {_place(pod.obj): pod.views for pod in seen}
    every = [view for found in views.values() for view in found]
    live = [view for view in every if view.weights is not None]
    pushes: dict[Kind, float] = {}
    for view in (view for view in every if view.updating or view.pushed):
        left = PUSH_SECONDS if view.updating else max(0.0, PUSH_SECONDS - view.weights_since)
        pushes[_kind(view)] = max(left, pushes.get(_kind(view), 0.0))
    weights = converged(every, home, before, hub, pushes) if hub is not None and hub.complete else dict(before)
    came: dict[tuple[Kind, str], float] = {}
    for view in live:
        what = _kind(view), _hex(view)
        came[what] = max(view.weights_since, came.get(what, 0.0))
    return _Look(seen, hub, weights, came, pushes, lease_seconds, now, away_seconds).result(default, overrides)


def lives_of(pods: Iterable[Json], before: Mapping[str, Life], clock: float) -> dict[str, Life]:
    """The lives of containers by the uid of their pods, to be remembered until the next look. A pod that has no gate yet may have the name
    of one that is gone, and whose engines live on for a lease."""
    found: dict[str, Life] = {}
    for pod in filter(_counts, pods):
        name, uid = _life(pod), pod["metadata"]["uid"]
        known = before.get(uid, Life(name, over=None if condition_of(pod, GATE) else clock))
        if known.name not in (name, ""):
            known = Life(name, over=clock, gate=condition_of(pod, GATE))
        since = clock if known.ready is None else known.ready
        found[uid] = known._replace(name=name, ready=since if condition_of(pod, "ContainersReady").get("status") == "True" else None)
    return found


@dataclass(eq=False)
class _Look:
    _pods: Sequence[_Pod]
    _hub: HubView | None
    _weights: dict[Kind, str]
    """W."""
    _came: dict[tuple[Kind, str], float]
    """For how long the first live engine of a kind has held weights."""
    _pushes: dict[Kind, float]
    """For how much longer a push may go on, by kind."""
    _lease: float
    _now: datetime
    _away: float

    def result(self, default: Serve, overrides: Mapping[str, Serve]) -> Serving:
        verdicts = [(pod, self._judge(pod)) for pod in self._pods]
        stays = self._stay(verdicts)
        verdicts = [(pod, _Verdict(None, wait=verdict.wait) if pod.uid in stays else verdict) for pod, verdict in verdicts]
        turns = [turn for pod, verdict in verdicts if (turn := self._turn(pod, verdict)) is not None]
        unsaid: dict[str, list[str]] = defaultdict(list)
        for pod, verdict in verdicts:
            if verdict.reason in UNSAID:
                unsaid[verdict.reason].append(pod.name)
        asked = [default, *overrides.values()]
        named = dict.fromkeys(serve.weights for serve in asked if serve.weights not in (ANY, CONVERGED))
        absent = tuple(name for name in named if not self._named(name)) if self._hub is not None and self._hub.complete else ()
        served = sorted(set(self._weights.values())) if any(serve.weights == CONVERGED for serve in asked) else []
        served += [weights for name in named for weights in self._named(name)]
        return Serving(
            serves=tuple(dict.fromkeys(map(self._called, served))),
            turns=tuple(turns),
            held=tuple(
                (pod.name, ", ".join(sorted({self._called(_hex(view)) for view in pod.views})))
                for pod, verdict in verdicts
                if verdict.reason == "OtherWeights"
            ),
            stays=tuple(sorted(pod.name for pod in self._pods if pod.uid in stays)),
            unsaid={reason: tuple(sorted(names)) for reason, names in unsaid.items()},
            absent=absent,
            strict=any(serve.strict for serve in asked),
            weights=self._weights if any(serve.weights == CONVERGED for serve in asked) else {},
            look_again=min(filter(None, (*self._pushes.values(), *(verdict.wait for _, verdict in verdicts))), default=None),
        )

    # ---- the rule ----

    def _judge(self, pod: _Pod) -> _Verdict:
        serve = pod.serve
        if serve.weights == ANY:
            return _Verdict(True, "NotGated")
        if self._hub is None:
            return self._unsaid(pod, "HubUnavailable", self._lease - self._away)
        if not pod.views or any(view.weights is None for view in pod.views):
            return self._silent(pod, self._hub)
        if serve.weights == CONVERGED and not all(_kind(view) in self._weights for view in pod.views):
            held = min(view.weights_since for view in pod.views)
            return self._unsaid(pod, "NoMajority", PUSH_SECONDS - held if self._hub.complete else None)
        apart = [view for view in pod.views if not self._serves(serve, view)]
        if not apart:
            return _Verdict(None if any(view.updating for view in pod.views) else True, "Holds")
        return self._judge_others(pod, apart)

    def _judge_others(self, pod: _Pod, apart: Sequence[EngineView]) -> _Verdict:
        """The pod is known to hold others."""
        if pod.serve.weights == CONVERGED:
            left = self._ahead(apart) if pod.open and not pod.new else None
            return _Verdict(None, wait=left) if left is not None else _Verdict(False, "OtherWeights")
        if self._named(pod.serve.weights) or pod.serve.strict or (pod.open and pod.new):
            return _Verdict(False, "OtherWeights")
        return _Verdict(None)

    def _silent(self, pod: _Pod, hub: HubView) -> _Verdict:
        """Engines of the pod do not report, or not their weights."""
        if not pod.views:
            return self._unsaid(pod, "NotReporting", self._lease - pod.ready if hub.complete and pod.ready is not None else None)
        silent = [view.weights_since for view in pod.views if view.weights is None and not view.updating]
        # While a pod starts, it is no loss that its weights are not known yet.
        left = self._lease - min(pod.ready, max(silent)) if silent and pod.ready is not None else None
        return self._unsaid(pod, "WeightsUnknown", left)

    def _unsaid(self, pod: _Pod, why: str, left: float | None) -> _Verdict:
        """Nobody can tell what the pod holds. `left`: how much longer it may stay so; None: until there is news."""
        if left is not None and left <= 0:
            return _Verdict(not pod.serve.strict, why)
        return _Verdict(False, "Starting", wait=left) if pod.open and pod.new else _Verdict(None, wait=left)

    def _serves(self, serve: Serve, view: EngineView) -> bool:
        """Whether what the engine holds may serve."""
        held = _hex(view)
        return held == self._weights[_kind(view)] if serve.weights == CONVERGED else held in self._named(serve.weights)

    def _named(self, name: str) -> frozenset[str]:
        groups = self._hub.weights if self._hub is not None else ()
        return frozenset(group.id for group in groups if is_called(group.id, group.label, name))

    def _ahead(self, apart: Sequence[EngineView]) -> float | None:
        """For how much longer the pod may be ahead; None: it is not."""
        if any(view.weights_since >= self._came.get((_kind(view), self._weights[_kind(view)]), inf) for view in apart):
            return None
        left = PUSH_SECONDS - max(view.weights_since for view in apart)
        left = max(left, *(self._pushes.get(_kind(view), 0.0) for view in apart))
        return left if left > 0 else None

    def _stay(self, verdicts: Sequence[tuple[_Pod, _Verdict]]) -> set[str]:
        """Those that would leave and have to stay, by uid."""
        groups: dict[str, list[tuple[_Pod, _Verdict]]] = defaultdict(list)
        for pod, verdict in verdicts:
            groups[pod.group].append((pod, verdict))
        found: set[str] = set()
        for members in groups.values():
            could = [(pod, verdict) for pod, verdict in members if pod.ready is not None]
            out = [pod for pod, verdict in could if pod.open and verdict.status is False and not pod.serve.strict]
            leave = [uid for _, _, uid in sorted((not is_ready(pod.obj), pod.name, pod.uid) for pod in out)]
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
        if (pod.gate.get("status"), pod.gate.get("reason")) == (status, reason) and not (verdict.status and (pod.new or not pod.named)):
            return None
        now = timestamp(self._now)
        moved = pod.gate.get("lastTransitionTime") if pod.gate.get("status") == status else None  # who writes by hand leaves it out
        names = INSTANCES + ", ".join(sorted(view.instance.hex() for view in pod.views)) if pod.views else ""
        condition = {"type": GATE, "status": status, "reason": reason, "message": _TEXTS[reason] + names}
        group = "" if pod.serve.strict or (pod.open and verdict.status) else pod.group
        return Turn(pod.obj, {**condition, "lastProbeTime": now, "lastTransitionTime": moved or now}, group)

    def _called(self, weights: str) -> str:
        return self._hub.called(weights) if self._hub is not None else called(weights, "")


def converged(
    engines: Iterable[EngineView], home: str, before: Mapping[Kind, str], hub: HubView, pushes: Mapping[Kind, float]
) -> dict[Kind, str]:
    """W of each kind."""
    holders: dict[Kind, dict[str, list[EngineView]]] = defaultdict(lambda: defaultdict(list))
    away: dict[Kind, list[EngineView]] = defaultdict(list)
    for view in engines:
        if view.weights is not None:
            holders[_kind(view)][_hex(view)].append(view)
        elif (view.updating and view.weights_since < AWAY_SECONDS) or (view.pushed and (view.asleep or view.weights_since < PUSH_SECONDS)):
            away[_kind(view)].append(view)
    labels = {weights.hex(): label for weights, label in hub.labels.items()}
    found: dict[Kind, str | None] = {}
    came: dict[Kind, str] = {}
    for kind in holders.keys() | away.keys():
        votes = _votes(holders[kind], away[kind], before.get(kind))
        found[kind] = most = _served(votes, before.get(kind) if pushes.get(kind) else None)
        if most and any(view.pushed for view in holders[kind].get(most) or votes[most]):
            came[kind] = most
    for kind in sorted((kind for kind, weights in found.items() if weights is None), key=lambda kind: (kind[0] != home, kind)):
        if ours := found.get((home, kind[1])):
            found[kind] = ours
            continue
        known = {weights for other, weights in came.items() if other[0] in (home, kind[0])}
        alike = known | {labels[weights] for weights in known if weights in labels}
        votes = {weights: views for weights, views in holders[kind].items() if not known or {weights, labels.get(weights)} & alike}
        found[kind] = _served(votes, None)
    return {kind: weights for kind, weights in sorted(found.items()) if weights is not None}


def _votes(holders: Mapping[str, Sequence[EngineView]], away: Sequence[EngineView], before: str | None) -> dict[str, Sequence[EngineView]]:
    """Of one kind: who votes for which weights."""
    if before is None:
        return {weights: [view for view in views if view.pushed] for weights, views in holders.items()}
    others = {weights: [view for view in views if view.pushed] for weights, views in holders.items() if weights != before}
    # For how long the push goes on: since its first call, or since an engine took weights shortly before that.
    begun = max((view.weights_since for view in away if view.updating), default=inf)
    for since in sorted(view.weights_since for views in others.values() for view in views):
        begun = max(begun, since) if since <= begun + PUSH_SECONDS else begun
    # Those that earlier pushes brought have missed what served since.
    others = {weights: [view for view in views if view.weights_since <= begun] for weights, views in others.items()}
    latest = min((view.weights_since for views in others.values() for view in views), default=inf)
    return {**others, before: [*holders.get(before, ()), *(view for view in away if view.weights_since <= latest)]}


def _served(votes: Mapping[str, Sequence[EngineView]], before: str | None) -> str | None:
    """`before`: what goes on among as many votes; None: nothing does."""
    most = max(map(len, votes.values()), default=0)
    top = sorted(weights for weights, views in votes.items() if len(views) == most > 0)
    if len(top) == 1:
        return top[0]
    if before in top:
        return before
    came = [(view.weights_since, weights) for weights in top for view in votes[weights] if view.pushed and view.weights is not None]
    return min(came)[1] if came else None


# ---- from the objects of a cluster ----


def _counts(pod: Json) -> bool:
    return has_gate(pod) and pod["metadata"].get("deletionTimestamp") is None and not ended(pod)


def _pod(
    pod: Json,
    home: str,
    default: Serve,
    overrides: Mapping[str, Serve],
    views: Mapping[Place, Sequence[EngineView]],
    lives: Mapping[str, Life],
    clock: float,
) -> _Pod:
    (space, name), gate = _place(pod), condition_of(pod, GATE)
    engine = (pod["metadata"].get("labels") or {}).get(ENGINE_LABEL, "") if space == home else ""  # a guest writes its labels itself
    life = lives.get(pod["metadata"]["uid"], Life(""))
    latest = [view for view in views.get(_place(pod), ()) if life.over is None or clock - view.silent_seconds >= life.over]
    known = frozenset(filter(None, str(gate.get("message", "")).partition(INSTANCES)[2].split(", ")))
    named = known.issuperset(view.instance.hex() for view in latest)
    return _Pod(
        obj=pod,
        name=name,
        uid=pod["metadata"]["uid"],
        serve=ANYTHING if _is_worker(pod) else overrides.get(engine, default),
        group="/".join((space, engine or controller_of(pod).get("uid") or name)),
        gate=gate,
        ready=clock - life.ready if life.ready is not None else None,
        views=tuple(latest),
        named=named,
        new=not named if known and latest else gate == life.gate,
    )


def _is_worker(pod: Json) -> bool:
    """Of a replica of several pods, one that answers nobody and whose ranks the first one speaks for."""
    return bool((pod["metadata"].get("labels") or {}).get(WORKER_LABEL, "0") != "0")


def _place(pod: Json) -> Place:
    return pod["metadata"]["namespace"], pod["metadata"]["name"]


def _by_pod(pods: Sequence[Json], home: str, engines: Iterable[EngineView]) -> dict[Place, Sequence[EngineView]]:
    """Of each engine and rank, the live instance that started last: the one before lives on for a lease. By the pod that has the gate: of
    several nodes, the first one, after which LeaderWorkerSet names the others. Outside of Kubernetes each instance is an engine."""
    leaders = {_place(pod): (pod["metadata"]["namespace"], pod["metadata"]["name"].rsplit("-", 1)[0]) for pod in pods if _is_worker(pod)}
    spaces = {pod["metadata"]["name"]: pod["metadata"]["namespace"] for pod in pods}  # of an engine that does not know its own
    latest: dict[tuple[Place, str | bytes, int], EngineView] = {}
    for view in sorted((view for view in engines if view.alive), key=lambda view: (-view.age_seconds - view.silent_seconds, view.instance)):
        space = (view.namespace if view.pod else home) or spaces.get(view.pod, home)
        latest[(space, view.pod), view.engine if view.pod else view.instance, view.rank] = msgspec.structs.replace(view, namespace=space)
    found: dict[Place, list[EngineView]] = defaultdict(list)
    for (place, *_), view in latest.items():
        found[leaders.get(place, place)].append(view)
    return {**found}


def _life(pod: Json) -> str:
    containers: list[Any] = (pod.get("status") or {}).get("containerStatuses") or []
    name = (pod["metadata"].get("annotations") or {}).get(JOINED, "engine")
    found = next((one for one in containers if one.get("name") == name), containers[0] if len(containers) == 1 else None)
    return str((((found or {}).get("state") or {}).get("running") or {}).get("startedAt") or "")


def _kind(view: EngineView) -> Kind:
    return view.namespace, view.fingerprint


def _hex(view: EngineView) -> str:
    assert view.weights is not None
    return view.weights.hex()
