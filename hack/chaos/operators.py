"""Two operators that share a Lease, each with its own way to the API server: killed, frozen beyond the Lease, ended, started again."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from hack.cluster.controlplane import ControlPlane
from hack.waiting import eventually, poll
from tests.cluster.fault_proxy import Fault, FaultProxy, is_write
from tests.cluster.operator_harness import OperatorProcess

LEASE_SECONDS = 6
"""Short, so that takeovers come soon, and long enough for a machine with other work."""
EVERY_SECONDS = (3.0, 10.0)
DOWN_SECONDS = (0.0, 4.0)
FROZEN_SECONDS = (0.5, 12.0)
TAKEOVER_SECONDS = 25.0
ENDS_SECONDS = 15.0


@dataclass(eq=False)
class Member:
    """One of the operators."""

    process: OperatorProcess
    proxy: FaultProxy
    writes: list[str] = field(default_factory=list)
    in_hand: bool = False
    """Somebody kills or freezes it now, and starts it again."""

    def leads(self) -> bool:
        return self.process.http("/readyz", 2.0)[0] == 200

    def note(self, decide: Callable[[str, str], Fault | None]) -> None:
        """Remember what it writes, and let `decide` have its way."""

        def noted(method: str, path: str) -> Fault | None:
            if is_write(method, path):
                self.writes.append(f"{method} {path}")
            return decide(method, path)

        self.proxy.decide = noted


class Operators:
    """Context manager over the two of them. `trouble` starts a thread that gives them no peace; `calm` ends it with both alive."""

    def __init__(self, plane: ControlPlane, namespace: str, folder: Path, endpoint: Callable[[], str], seed: object) -> None:
        self._plane, self._namespace, self._folder, self._endpoint = plane, namespace, folder, endpoint
        self._random = random.Random(f"{seed}:operators")
        self._stack = contextlib.ExitStack()
        self._over = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._trouble)
        self._supervisor = threading.Thread(target=self._supervise)
        self.members: list[Member] = []
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            for _ in range(2):
                proxy = stack.enter_context(FaultProxy(self._plane, self._folder))
                options = {"lease_duration_seconds": LEASE_SECONDS, "hub_endpoint": self._endpoint()}
                process = OperatorProcess(self._plane, self._namespace, self._folder, kubeconfig=proxy.kubeconfig, **options)
                self.members.append(Member(stack.enter_context(process), proxy))
            self._stack = stack.pop_all()
        self._supervisor.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(60)
        self.dismiss()
        self._stack.close()

    def dismiss(self) -> None:
        """Kill both, for good."""
        self._closed.set()
        self._supervisor.join(30)
        for member in self.members:
            member.process.process.kill()

    @property
    def leader(self) -> Member | None:
        return next((member for member in self.members if member.process.process.alive() and member.leads()), None)

    def hub_port(self) -> int | None:
        """Where a Service would send a new connection."""
        leader = self.leader
        return leader.process.hub_port if leader is not None else None

    def trouble(self) -> None:
        self._thread.start()

    def calm(self) -> None:
        """No more of it; returns when one of them leads."""
        self._over.set()
        self._thread.join(90)
        eventually(lambda: self.leader, self.tails, 90)

    def tails(self) -> str:
        return "\n".join(f"{member.process.log_file}:\n{member.process.tail(15)}" for member in self.members)

    def crashes(self) -> list[str]:
        """Errors in their logs that no fault explains."""
        return [f"{member.process.log_file.name}: {line}" for member in self.members for line in _crashes(member.process)]

    def _trouble(self) -> None:
        acts = (self._kill, self._kill, self._end, self._freeze, self._freeze)
        while not self._over.wait(self._random.uniform(*EVERY_SECONDS)):
            member = self._chosen()
            member.in_hand = True
            try:
                self._random.choice(acts)(member)
            finally:
                member.in_hand = False

    def _chosen(self) -> Member:
        """Mostly the one that leads."""
        leader = self.leader if self._random.random() < 0.8 else None
        return leader or self._random.choice(self.members)

    def _supervise(self) -> None:
        """Start again who has ended, as a kubelet does."""
        while not self._closed.wait(0.2):
            for member in self.members:
                if not member.in_hand and not member.process.process.alive():
                    self.counts[f"exit {member.process.process.popen.returncode}"] += 1
                    member.process.start()

    def _kill(self, member: Member) -> None:
        if member.process.process.alive():
            self.counts["killed"] += 1
            member.process.process.kill()
        self._over.wait(self._random.uniform(*DOWN_SECONDS))
        member.process.start()

    def _end(self, member: Member) -> None:
        if member.process.process.alive():
            self.counts["told to end"] += 1
            with contextlib.suppress(Exception):  # whoever does not end in time is killed, as by a kubelet
                member.process.terminate(ENDS_SECONDS)
            member.process.process.kill()
        member.process.start()

    def _freeze(self, member: Member) -> None:
        """Stop the whole process; if the other one leads when it goes on, it must neither write nor stay."""
        if not member.process.process.alive():
            return
        led = member.leads()
        member.process.process.signal(signal.SIGSTOP)
        try:
            self._over.wait(self._random.uniform(*FROZEN_SECONDS))
            others = [other for other in self.members if other is not member]
            beyond = led and bool(poll(lambda: any(other.leads() for other in others), TAKEOVER_SECONDS * (self._random.random() < 0.5)))
            written = len(member.writes)
        finally:
            member.process.process.signal(signal.SIGCONT)
        self.counts["frozen beyond its Lease" if beyond else "frozen"] += 1
        if not beyond:
            return
        if not poll(lambda: not member.process.process.alive(), ENDS_SECONDS):
            self.problems.append(f"{member.process.log_file.name}: did not end after it lost its Lease while frozen")
        if late := member.writes[written:]:
            self.problems.append(f"{member.process.log_file.name}: wrote after another one led: {late}")


def _crashes(process: OperatorProcess) -> Iterator[str]:
    for line in process.lines():
        if line.get("level") == "raw" and "Traceback" in line["event"]:
            yield line["event"]
        elif "exception" in line and str(line.get("logger")).startswith("epochkv"):
            yield f"{line['event']}: {line.get('error') or line.get('reason')}: {line['exception'][-1500:]}"
