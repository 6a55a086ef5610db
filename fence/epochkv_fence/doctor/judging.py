"""What two looks at a pool say about it. Pure: times are in the looks.

Clocks are never compared between machines: only how fast they run matters, for a lease is counted on two of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from epochkv_fence.client.results import Engine, PoolStatus, called, listed, report
from epochkv_fence.doctor.finding import Finding, Say
from epochkv_fence.doctor.looking import HubLook
from epochkv_fence.protocol.pool import margin_seconds

PUSH_SECONDS: Final = 60.0
"""While weights are pushed engines differ: for so long that is no news."""
SPAN_SECONDS: Final = 1.5
"""Two heartbeats that are closer say too little about a clock."""
HUB_RATE: Final = 0.05
JITTER_SECONDS: Final = 0.5
"""So late may one heartbeat be on a busy machine."""
COSTLY: Final = ("TiersBroken", "LayoutUnsupported")
PACKAGES: Final = {"epochkv": "EpochKV", "vllm": "vLLM", "mooncake": "Mooncake"}


@dataclass(frozen=True, slots=True)
class Words:
    """What fixes are made of.

    Attributes:
        wait: the command that waits for an epoch, with `{}` for it.
        restart: what restarts an engine, by its name and its pod (empty: nobody provisioned it).
    """

    wait: str
    restart: Callable[[str, str], str]


def standalone_words(config: str) -> Words:
    """Without Kubernetes; `config` is what `--config` takes."""
    option = f" --config {config}" if config else ""
    return Words(f"epochkv wait {{}}{option}", lambda name, pod: f"end the process of engine {name}, and start it again")


def judge_epoch(look: HubLook, words: Words, about: str = "") -> list[Finding]:
    """Whether a reset is open, and who it waits for."""
    say, now = Say("epoch", about), look.second
    if now.converged:
        return [say.ok(f"epoch {now.published} is published: no engine uses an older one")]
    late = [f"{engine.name} (heard {engine.silent_seconds:.0f} s ago)" for engine in now.engines if engine.state == "behind"]
    waits = f"waits for {listed(late)}" if late else "waits for leases that are out"
    bound = now.lease_seconds + margin_seconds(now.lease_seconds)
    text = f"epoch {now.target} is asked for and {now.published} is published: it {waits}, for {bound:.0f} s at most"
    return [say.warning(text, words.wait.format(now.target))]


def judge_engines(look: HubLook, words: Words, about: str = "") -> list[Finding]:
    """Engines that are not there, stalled, silent, doubled, or share nothing."""
    say, now = Say("engines", about), look.second
    if not now.engines:
        if now.settling_seconds:
            text = f"the hub has only begun to lead: who lives is known in {now.settling_seconds:.0f} s"
            return [say.warning(text, "run this command again then")]
        return [say.warning("no engine is connected, so nobody uses this pool", "start one with this pool's connection file")]
    found = [*_stalled(look, words, say), *_silent(now, say), *_doubled(now, say), *_unknown(now, say)]
    if found:
        return found
    states = Counter(engine.state for engine in now.engines)
    alone = f", {states['private']} alone until the next epoch" if states["private"] else ""
    return [say.ok(f"{_counted(len(now.engines))} connected, {states['use']} in use{alone}")]


def _stalled(look: HubLook, words: Words, say: Say) -> Iterable[Finding]:
    """Alive, and below the published epoch in both looks: its agent lives and its scheduler does not move on."""
    before = {engine.boot: engine for engine in look.first.engines}
    for engine in look.second.engines:
        old = before.get(engine.boot)
        below = [one for one in (old, engine) if one is not None and (one.epoch is None or one.epoch < look.first.published)]
        if len(below) == 2:
            at = "has adopted no epoch yet" if engine.epoch is None else f"is at epoch {engine.epoch}"
            text = f"engine {engine.name} {at}, while {look.second.published} is published: it stalls, and shares nothing"
            yield say.wrong(text, words.restart(engine.name, engine.pod))


def _silent(now: PoolStatus, say: Say) -> Iterable[Finding]:
    for engine in now.engines:
        if engine.silent_seconds > 2 / 3 * now.lease_seconds:
            left = max(0.0, now.lease_seconds - engine.silent_seconds)
            text = f"engine {engine.name} was last heard {engine.silent_seconds:.0f} s ago; its lease ends in {left:.0f} s"
            yield say.warning(text, "look whether its process runs and reaches the hub")


def _doubled(now: PoolStatus, say: Say) -> Iterable[Finding]:
    """Two live processes of one name. One that was just replaced is silent, one whose parent was killed is not."""
    heard = [engine for engine in now.engines if engine.silent_seconds <= 2 / 3 * now.lease_seconds]
    for name, number in sorted(Counter(engine.name for engine in heard).items()):
        if number > 1:
            text = f"{number} live processes report as {name}: an engine core may have lost its parent, and resets wait for it"
            yield say.warning(text, "ps -eo pid,ppid,args | grep VLLM::   # end those with parent 1")


def _unknown(now: PoolStatus, say: Say) -> Iterable[Finding]:
    for engine in now.engines:
        if engine.state == "unknown":
            yield say.warning(f"engine {engine.name} shares nothing, for it does not know its weights: {engine.weights_note or 'not yet'}")


def judge_weights(look: HubLook, about: str = "") -> list[Finding]:
    """Whether the engines of each fingerprint hold the same."""
    say, now = Say("weights", about), look.second
    found = report(now.engines, now.labels)
    kinds = Counter(group.fingerprint for group in found.groups)
    if all(number == 1 for number in kinds.values()):
        apart = f"; {len(kinds)} kinds of engines share nothing with each other" if len(kinds) > 1 else ""
        held = listed([called(group.id, group.label) for group in found.groups])
        return [say.ok(f"all engines hold {held}{apart}" if found.groups else "no engine says what it holds")]
    parts = "; ".join(f"{called(group.id, group.label)}: {listed(group.engines)}" for group in found.groups)
    fix = "push the weights again to those that missed them; `epochkv weights` lists all"
    if min(group.since_s for group in found.groups if kinds[group.fingerprint] > 1) < PUSH_SECONDS:
        return [say.warning(f"engines hold different weights, which changed in the last minute: {parts}", fix)]
    return [say.wrong(f"engines hold different weights, for more than a minute: {parts}", fix)]


def judge_tiers(look: HubLook, about: str = "") -> list[Finding]:
    """Engines that cannot use their tiers, or not all of them."""
    say = Say("tiers", about)
    limited = [engine for engine in look.second.engines if engine.tiers_off]
    by_note: dict[tuple[str, str], list[str]] = {}
    for engine in limited:
        by_note.setdefault((engine.tiers_off, engine.tiers_note or "it does not say why"), []).append(engine.name)
    found = []
    for (reason, note), names in sorted(by_note.items()):
        tell = say.wrong if reason in COSTLY else say.warning
        found.append(tell(f"{listed(names)}: {reason}: {note}", "change what the line says, then restart the engine"))
    return found or [say.ok("no engine that reports lacks a tier")]


def judge_versions(look: HubLook, here: str, about: str = "") -> list[Finding]:
    """Whether hub, engines and this command run one version of each package."""
    say, now = Say("versions", about), look.second
    found = []
    if not now.hub_version:
        found.append(say.warning("the hub does not say its version: it is older than this command", "upgrade the hub"))
    elif here and now.hub_version != here:
        text = f"the hub runs EpochKV {now.hub_version}, and this command is {here}"
        found.append(say.warning(text, f"pip install 'epochkv[trainer]=={now.hub_version}'"))
    silent = [engine.name for engine in now.engines if not engine.versions]
    if silent:
        found.append(say.warning(f"{listed(silent)}: older than this, and without a version", "upgrade their image or environment"))
    for package in PACKAGES:
        found += _mixed(package, now.engines, now.hub_version if package == "epochkv" else "", say)
    return found or [say.ok(_all_versions(now, here))]


def _mixed(package: str, engines: Sequence[Engine], hub: str, say: Say) -> Iterable[Finding]:
    """Versions of a package among the engines. Mooncake's clients of two versions may read each other's bytes wrongly, in silence."""
    by_version: dict[str, list[str]] = {}
    for engine in engines:
        if version := engine.versions.get(package, ""):
            by_version.setdefault(version, []).append(engine.name)
    parts = "; ".join(f"{version}: {listed(names)}" for version, names in sorted(by_version.items()))
    if len(by_version) > 1:
        text = f"engines run different versions of {PACKAGES[package]}: {parts}"
        if package == "mooncake":
            yield say.wrong(text, "give all engines and stores one image, or one wheel of Mooncake")
        else:
            yield say.warning(f"{text}; they share no KV with each other" if package == "vllm" else text, "finish the upgrade")
    elif by_version and hub and hub not in by_version:
        yield say.warning(f"the hub runs EpochKV {hub}, and the engines {parts}", "finish the upgrade")


def _all_versions(now: PoolStatus, here: str) -> str:
    where = ["hub", *(["engines"] if now.engines else []), *(["this command"] if here else [])]
    told = [f"EpochKV {now.hub_version} ({', '.join(where)})"]
    for package in ("vllm", "mooncake"):
        found = {engine.versions[package] for engine in now.engines if package in engine.versions}
        told += [f"{PACKAGES[package]} {version}" for version in sorted(found)]
    return ", ".join(told)


def judge_clocks(look: HubLook, about: str = "") -> list[Finding]:
    """Whether an engine's clock runs so slowly that it would believe in a lease that is over for the hub."""
    say, lease = Say("clocks", about), look.second.lease_seconds
    allowed = margin_seconds(lease) / lease
    before = {engine.boot: engine for engine in look.first.engines}
    same = [(before[engine.boot], engine) for engine in look.second.engines if engine.boot in before]
    found, measured = [], 0
    if (hub := _hub_rate(look, same)) is not None and abs(hub - 1.0) > HUB_RATE:
        text = f"the hub's clock runs at {hub:.0%} of the rate of this machine's"
        found.append(say.warning(text, "cat /sys/devices/system/clocksource/clocksource0/current_clocksource   # on both machines"))
    for old, new in same:
        spans = _spans(look, old, new)
        if spans is None:
            continue
        measured += 1
        lost = spans[1] - spans[0]
        if lost > JITTER_SECONDS and lost / spans[1] > allowed:
            text = f"the clock of engine {new.name} lost {lost:.1f} s in {spans[1]:.1f} s; the fence allows {allowed:.0%}"
            found.append(say.warning(text, "run this command again; if it stays, look at the clock source of its machine"))
    if found:
        return found
    if hub is None and not measured:
        return [say.ok(f"not measured: no engine was heard in both looks; the fence allows rates that differ by {allowed:.0%}")]
    shown = [f"the hub's is within {abs(hub - 1.0):.1%} of this machine's"] if hub is not None else []
    shown += [f"those of {measured} of {_counted(len(look.second.engines))} keep up with it"] if measured else []
    return [say.ok(f"rates: {', '.join(shown)}; the fence allows {allowed:.0%}")]


def _hub_rate(look: HubLook, same: Sequence[tuple[Engine, Engine]]) -> float | None:
    """How fast the hub counted an engine's silence, against this machine's clock; None: each engine was heard in between."""
    passed = look.second_at - look.first_at
    grown = [new.silent_seconds - old.silent_seconds for old, new in same if new.age_seconds == old.age_seconds]
    return max(grown) / passed if grown and passed >= SPAN_SECONDS else None


def _spans(look: HubLook, old: Engine, new: Engine) -> tuple[float, float] | None:
    """Seconds between the newest heartbeats of two looks, by the engine's clock and by the hub's; None: too short to tell."""
    by_engine = new.age_seconds - old.age_seconds
    by_hub = (look.second_at - new.silent_seconds) - (look.first_at - old.silent_seconds)
    return (by_engine, by_hub) if by_engine > 0 and by_hub >= SPAN_SECONDS else None


def _counted(number: int) -> str:
    return "1 engine" if number == 1 else f"{number} engines"
