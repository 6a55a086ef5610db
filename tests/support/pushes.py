"""Pushes of weights to the engines of tests: what each holds afterwards, told at once as a connector tells it."""

from __future__ import annotations

from collections.abc import Iterable

from epochkv_fence.net import AgentThread
from tests.support.fence import FakeEngine

OLD, NEW, OTHER = b"\x0a" * 16, b"\x3f\x2a\x9c\x1e" * 4, b"\x77" * 16

Running = tuple[AgentThread, FakeEngine]


def push(engines: Iterable[Running], holds: bytes | str) -> None:
    """They hold these weights now; text: nobody can tell which, and this is why."""
    for agent, engine in engines:
        engine.holds = holds
        agent.poke()


def engine_with(holds: bytes | str) -> FakeEngine:
    """One that starts with these weights."""
    engine = FakeEngine()
    engine.holds = holds
    return engine
