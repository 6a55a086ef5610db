"""The rows that need sockets and nothing else: latency by size, steady state, faults, a hub that restarts."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.fence.parts import Child, Fence, Trainer, cpu_seconds, rss_bytes
from bench.report import Figure, Progress, Row, latency_figures
from hack.standalone.relay import Relay
from hack.waiting import eventually
from tests.security.flooder import flooding

LEASE_SECONDS = 30.0
FAULT_LEASE_SECONDS = 3.0
JOIN_SECONDS = 120.0
BUMP_SECONDS = 120.0
ENGINES_PER_PROCESS = 2_500
FLOOD_RATE = 10_000
FLOOD_PAUSE_SECONDS = 0.02


@dataclass
class Bench:
    fence: Fence
    swarms: list[Child]
    trainer: Trainer

    @property
    def hub_pid(self) -> int:
        assert self.fence.hub is not None
        return self.fence.hub.process.pid

    def live(self) -> int:
        return sum(int(swarm.ask("state")["live"]) for swarm in self.swarms)

    def longest_gap(self) -> float:
        """The longest time that any engine was without a lease since `forget`."""
        return max(float(swarm.ask("state")["longest_gap"]) for swarm in self.swarms)

    def forget(self) -> None:
        for swarm in self.swarms:
            swarm.ask("forget")


@contextmanager
def bench(num_engines: int, lease_seconds: float = LEASE_SECONDS) -> Iterator[Bench]:
    """Everything started, and every engine granted."""
    with ExitStack() as stack:
        fence = Fence(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="epochkv-bench-"))), lease_seconds)
        fence.start_hub()
        stack.callback(lambda: fence.hub.close() if fence.hub is not None else None)
        num_processes = max(1, -(-num_engines // ENGINES_PER_PROCESS))
        swarms = [stack.enter_context(fence.swarm(num_engines // num_processes)) for _ in range(num_processes)]
        trainer = Trainer(fence.endpoint, fence.keys)
        stack.callback(trainer.close)
        made = Bench(fence, swarms, trainer)
        eventually(lambda: made.live() == num_engines, f"{num_engines} engines granted", JOIN_SECONDS)
        yield made


def flooded_latency(num_engines: int, aim_p99_ms: float, bumps: int, progress: Progress) -> Row:
    """The same while an authenticated client of the same pool sends 10,000 garbage frames a second."""
    with bench(num_engines) as made:
        assert made.fence.hub is not None
        epoch, seconds = made.trainer.target(), []
        with flooding("garbage", made.fence.endpoint, FLOOD_RATE, made.fence.keys) as counts:
            time.sleep(1.0)
            began, cpu = time.monotonic(), cpu_seconds(made.hub_pid)
            for number in range(bumps):
                progress.step(number, bumps, began)
                seconds.append(made.trainer.bump(epoch := epoch + 1, BUMP_SECONDS))
                time.sleep(FLOOD_PAUSE_SECONDS)
            took = time.monotonic() - began
            share = (cpu_seconds(made.hub_pid) - cpu) / took
        made.fence.hub.close()
        taken = {name: count for name, count in made.fence.hub_counters().items() if name.startswith(("dropped", "refused"))}
        figures = [*latency_figures(seconds, aim_p99_ms), Figure("hub CPU, share of one core", share * 100, None, "%")]
        figures.append(Figure("frames that the hub threw away", sum(taken.values()) / (took + 1.0), None, "/s"))
        details = {"bumps": bumps, "seconds": seconds, "flooder": counts, "hub": taken}
        return Row(f"bump -> published under garbage, {num_engines} agents", figures, details)


def bump_latency(num_engines: int, aim_p99_ms: float, bumps: int, progress: Progress) -> Row:
    """From sending a bump until the hub says that it is published."""
    with bench(num_engines) as made:
        epoch, seconds = made.trainer.target(), []
        made.trainer.bump(epoch := epoch + 1, BUMP_SECONDS)  # the first one finds cold caches everywhere
        began, cpu = time.monotonic(), cpu_seconds(made.hub_pid)
        for number in range(bumps):
            progress.step(number, bumps, began)
            seconds.append(made.trainer.bump(epoch := epoch + 1, BUMP_SECONDS))
        cpu_per_bump = (cpu_seconds(made.hub_pid) - cpu) / bumps
        details: dict[str, Any] = {"bumps": bumps, "seconds": seconds, "hub_rss_bytes": rss_bytes(made.hub_pid)}
        figures = [*latency_figures(seconds, aim_p99_ms), Figure("hub CPU per bump", cpu_per_bump * 1e3, None)]
        figures.append(Figure("hub RSS", rss_bytes(made.hub_pid) / 2**20, None, "MiB"))
        return Row(f"bump -> published, {num_engines} agents, SQLite authority", figures, details)


def steady_state(num_engines: int, seconds: float, progress: Progress) -> Row:
    """CPU share of the hub while nothing happens."""
    with bench(num_engines) as made:
        settle = LEASE_SECONDS / 3 + 2  # what joining costs is over, and heartbeats come as they always will
        time.sleep(settle)
        cpu, began = cpu_seconds(made.hub_pid), time.monotonic()
        while time.monotonic() < began + seconds:
            time.sleep(1.0)
            progress.step(int(time.monotonic() - began), int(seconds), began)
        share = (cpu_seconds(made.hub_pid) - cpu) / (time.monotonic() - began)
        gap = made.longest_gap()
        figures = [
            Figure("hub CPU, share of one core", share * 100, 10.0, "%"),
            Figure("longest time without a lease", gap, 0.0, "s"),
            Figure("hub RSS", rss_bytes(made.hub_pid) / 2**20, None, "MiB"),
        ]
        return Row(f"steady state, {num_engines} agents, L = {LEASE_SECONDS:.0f} s", figures, {"seconds": seconds})


class Victim:
    """One engine process, and what it last said about its lease."""

    def __init__(self, fence: Fence, endpoint: str) -> None:
        keys = [fence.keys.hub_public, fence.keys.public, fence.keys.secret]
        self.child = Child("bench.fence.engine_process", {"endpoint": endpoint, "keys": keys})
        self.lease_until = 0.0
        self.epoch: int | None = None
        self.history: list[tuple[float, float, int | None]] = []

    def look(self) -> None:
        """Take in what it printed."""
        while not self.child.lines.empty():
            line = self.child.lines.get()
            self.lease_until, self.epoch = line["lease_until"], line["epoch"]
            self.history.append((line["at"], line["lease_until"], line["epoch"]))

    def live(self) -> bool:
        self.look()
        return time.monotonic() < self.lease_until

    @contextmanager
    def child_of(self) -> Iterator[Victim]:
        """Itself; its process ends with the block."""
        with self.child:
            yield self

    def longest_gap(self) -> float:
        """The longest time between the end of a lease and the next one."""
        self.look()
        pairs = zip(self.history, self.history[1:], strict=False)
        return max((max(0.0, at - lease) for (_, lease, _), (at, _, _) in pairs if lease), default=0.0)

    def lease_at(self, at: float) -> tuple[float, int | None]:
        """Its lease and epoch as they stood at that time."""
        self.look()
        standing = [(lease, epoch) for seen, lease, epoch in self.history if seen <= at]
        return standing[-1]


def hurt(kind: str, victim: Victim, relay: Relay) -> None:
    """Freeze, kill or cut off the victim."""
    if kind == "frozen":
        os.kill(victim.child.process.pid, signal.SIGSTOP)
        stat = Path(f"/proc/{victim.child.process.pid}/stat")
        eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "stopped", 10, pause=0.001)
    elif kind == "killed":
        victim.child.kill()
    else:
        relay.silent = True


def fault(kind: str, repeats: int, progress: Progress) -> Row:
    """One of 17 engines is hurt just before a bump: published within lease and margin, and never while it may use the old
    epoch."""
    seconds, slack, swallowed = [], [], 0
    with bench(16, FAULT_LEASE_SECONDS) as made:
        epoch, began = made.trainer.target(), time.monotonic()
        hold = made.fence.fence_timeout_seconds
        for number in range(repeats):
            progress.step(number, repeats, began)
            relay = Relay(made.fence.endpoint)
            victim = Victim(made.fence, relay.endpoint)
            try:
                eventually(victim.live, "the victim is granted", 20, pause=0.01)
                time.sleep(FAULT_LEASE_SECONDS * (0.1 + 0.8 * number / repeats))  # anywhere between two heartbeats
                victim.look()
                hurt(kind, victim, relay)
                seconds.append(made.trainer.bump(epoch := epoch + 1, BUMP_SECONDS))
                eventually(lambda wanted=epoch: wanted in made.fence.publications(), "the hub says when it published", 10, pause=0.005)
                at = made.fence.published[epoch]
                lease, known = victim.lease_at(at)
                assert (known if known is not None else epoch) < epoch, "the victim was not hurt"
                slack.append(at - lease)
                swallowed += relay.num_changed
            finally:
                if victim.child.process.poll() is None:
                    os.kill(victim.child.process.pid, signal.SIGCONT)
                    victim.child.kill()
                relay.close()
    figures = [
        Figure("longest until published", max(seconds), hold + 0.25, "s"),
        Figure("the same over L + margin", max(seconds) / hold, None, "x"),
        Figure("earliest, lease still live for", max(0.0, -min(slack)), 0.0, "s"),
    ]
    details = {"lease_seconds": FAULT_LEASE_SECONDS, "seconds": seconds, "seconds_after_the_lease": slack, "swallowed": swallowed}
    return Row(f"one of 17 engines {kind}, L = {FAULT_LEASE_SECONDS:.0f} s", figures, details)


def hub_restart(num_engines: int, outage_seconds: float, progress: Progress) -> Row:
    """The hub is killed and comes back after a while. One of the engines is a real `AgentThread` in a process of its own."""
    with bench(num_engines) as made, Victim(made.fence, made.fence.endpoint).child_of() as thread:
        hub = made.fence.hub
        assert hub is not None
        eventually(thread.live, "the agent's thread is granted", 20, pause=0.01)
        made.forget()
        began = time.monotonic()
        hub.kill()
        while time.monotonic() < began + outage_seconds:
            time.sleep(min(0.5, max(0.0, began + outage_seconds - time.monotonic())))
            progress.step(int(time.monotonic() - began), int(outage_seconds), began)
        made.fence.start_hub()
        restart = time.monotonic() - began
        eventually(lambda: made.live() == num_engines and thread.live(), "every engine granted again", JOIN_SECONDS, pause=0.02)
        rejoined = time.monotonic() - began - restart
        eventually(lambda: made.trainer.status().total > num_engines, "the hub heard from every engine", JOIN_SECONDS, pause=0.1)
        heard = time.monotonic() - began - restart
        gap = max(made.longest_gap(), thread.longest_gap())
        figures = [
            Figure("hub away for", restart, None, "s"),
            Figure("longest time without a lease", gap, restart + 1.0, "s"),
            Figure("hub back until all have leases", rejoined, None, "s"),
            Figure("hub back until it has heard from all", heard, None, "s"),
        ]
        name = f"hub killed, back after {restart:.1f} s, {num_engines} agents, L = {LEASE_SECONDS:.0f} s"
        return Row(name, figures, {"outage_seconds": outage_seconds})
