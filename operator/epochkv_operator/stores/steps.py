"""Which stores may go now, and what the master has to be asked: pure, from what is wanted, what is there and what the master says.

StatefulSets take pods away from the top. So a pod that was emptied goes once all pods above it have. When stores are wanted back, their
job is cancelled. Mooncake refuses that while blocks move, and has no way back for a store that it has emptied: such a pod goes, too,
and is made again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final, Literal

from epochkv_operator.planning.context import ScaleIn
from epochkv_operator.stores.admin import Job, Segment

AGAIN_SECONDS: Final = 10.0
"""After a job that failed, until the next one."""

Action = Literal["", "Drain", "Cancel"]


@dataclass(frozen=True)
class Seen:
    """One look. `pods`: address of each store pod by its ordinal, empty while it is not ready; `segments` None: no master answers."""

    live: int
    """Replicas of the StatefulSet."""
    wanted: int
    """Replicas of the pool."""
    pods: Mapping[int, str]
    segments: Sequence[Segment] | None
    job: Job | None
    silent: str = ""
    """Why no master answers."""


@dataclass(frozen=True)
class Step:
    """What follows: the next state, and what to ask of the master."""

    state: ScaleIn
    action: Action = ""
    segments: tuple[str, ...] = ()
    """Those to drain."""


def begin(live: int, wanted: int, now: datetime, timeout_seconds: int) -> ScaleIn:
    """The state of a scale-in that nobody has looked at: all stores stay."""
    return ScaleIn(live, wanted, live, wanted, now, now + timedelta(seconds=timeout_seconds))


def step(state: ScaleIn, seen: Seen, now: datetime, timeout_seconds: int) -> Step:
    """The next step of a scale-in that is not over."""
    if seen.wanted < state.low:  # more stores leave: they have as much time
        state = replace(state, low=seen.wanted, started=now, lossy=False)
    deadline = state.started + timedelta(seconds=timeout_seconds)
    state = replace(state, high=max(state.high, seen.live), wanted=seen.wanted, deadline=deadline, silent=seen.silent)
    useless = _useless(state, seen)
    late = now >= deadline and (seen.wanted < seen.live or bool(useless))
    hold = min([seen.wanted, *useless]) if late else _hold(seen, useless)
    state = replace(_progress(state, seen), hold=hold, lossy=state.lossy or late)
    if not useless and (seen.segments is not None or state.lossy):  # a master that is silent may have emptied stores that are to stay
        state = _over(state, seen, now)
    if late or seen.segments is None:
        return Step(state)
    if seen.job is not None and seen.job.open:
        return Step(state, "Cancel" if _wanted_back(seen.segments, seen.job, seen) else "")
    hosts = {address for ordinal in range(seen.wanted, seen.live) if (address := seen.pods.get(ordinal))}
    full = tuple(segment for segment in seen.segments if segment.host in hosts and segment.status == "OK")
    again = state.posted + timedelta(seconds=AGAIN_SECONDS) if state.posted is not None and state.failed else now
    if not full or now < again:
        return Step(state)
    held = state.moved + sum(segment.used for segment in full)
    return Step(replace(state, bytes=held, base=state.moved, posted=now), "Drain", tuple(segment.name for segment in full))


def _wanted_back(segments: Sequence[Segment], job: Job, seen: Seen) -> bool:
    """The job empties a store that is to stay."""
    hosts = {segment.host for segment in segments if segment.name in job.segments}
    return any(address in hosts for ordinal, address in seen.pods.items() if ordinal < seen.wanted)


def _progress(state: ScaleIn, seen: Seen) -> ScaleIn:
    job = seen.job
    if seen.segments is None:
        return state
    if job is None:
        return replace(state, job="", blocked=0)
    moved = max(state.moved, state.base + job.moved_bytes)
    return replace(state, moved=moved, blocked=job.blocked if job.open else 0, failed=job.status == "FAILED")


def _useless(state: ScaleIn, seen: Seen) -> list[int]:
    """Pods that are to stay, and take no blocks, as they were to leave before."""
    by_host = _statuses(seen)
    pods = [ordinal for ordinal in range(state.low, min(state.high, seen.wanted)) if seen.pods.get(ordinal)]
    return [ordinal for ordinal in pods if by_host.get(seen.pods[ordinal]) in ("DRAINING", "DRAINED")]


def _hold(seen: Seen, useless: Sequence[int]) -> int:
    """Replicas that the StatefulSet has to have: without the pods at the top that hold nothing, if they are to go or are useless.

    No pod is added above a useless one, which could not go then.
    """
    by_host = _statuses(seen)
    count = seen.live
    while seen.segments is not None and count > 0:
        ordinal = count - 1
        address = seen.pods.get(ordinal, "")
        # A ready store that the master does not know has just come, or the master has: it may hold blocks.
        status = by_host.get(address, "UNKNOWN") if address else ""
        if status != "DRAINED" and (status or ordinal < seen.wanted):
            break
        if ordinal < seen.wanted and ordinal not in useless:
            break
        count -= 1
    if count < seen.live or useless or _going(seen):
        return count
    return max(seen.live, seen.wanted)


def _statuses(seen: Seen) -> dict[str, str]:
    """Status of the segment of each address."""
    return {segment.host: segment.status for segment in seen.segments or ()}


def _going(seen: Seen) -> bool:
    """Pods that the StatefulSet has no use for are still there. Scaled up now, it would keep them, and they take no blocks."""
    return any(ordinal >= seen.live for ordinal in seen.pods)


def _over(state: ScaleIn, seen: Seen, now: datetime) -> ScaleIn:
    """With its end, once the StatefulSet has what is wanted and nothing of ours drains."""
    busy = seen.job is not None and seen.job.open and not state.lossy
    over = seen.live == seen.wanted == state.hold and not busy and not _going(seen)
    return replace(state, completed=now, low=seen.wanted) if over else state
