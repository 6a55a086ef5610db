"""What is said of a status beside its conditions."""

import asyncio
from collections.abc import Callable
from typing import Any

from epochkv_operator.control.reporter import Reporter
from epochkv_operator.kube.resources import POOLS

A, B = "aa" * 16, "bb" * 16


class ApiServer:
    """One object whose status is written, and the Events about it."""

    def __init__(self, obj: Any) -> None:
        self.obj, self.notes = obj, list[tuple[str, str]]()

    async def update(self, ref: object, decide: Callable[[Any], Any]) -> Any:
        self.obj["status"] = {**self.obj.get("status", {}), **(decide(self.obj) or {})}
        return self.obj

    def emit(self, obj: Any, *, warning: bool, reason: str, action: str, note: str) -> None:
        self.notes.append((reason, note))


def test_a_label_that_weights_had_not_is_an_event() -> None:
    server = ApiServer(
        {"apiVersion": POOLS.api_version, "kind": POOLS.kind, "metadata": {"namespace": "rl", "name": "policy", "uid": "u-1"}}
    )
    reporter = Reporter(server, server)  # type: ignore[arg-type]

    def labelled(held: str, **labels: str) -> list[tuple[str, str]]:
        """The hub has written these, and the operator reports who holds what."""
        server.notes.clear()
        server.obj["status"] = {
            **server.obj.get("status", {}),
            "weightsLabels": [{"id": {"a": A, "b": B}[name], "label": label} for name, label in labels.items()],
        }
        asyncio.run(reporter.report(server.obj, lambda obj: {**obj["status"], "weights": [{"id": held, "engines": 1}]}))
        return list(server.notes)

    assert labelled(A, a="step-0") == [], "nobody knows what was before"
    assert labelled(A, a="step-0") == []
    assert labelled(A, a="step-1") == [("WeightsRelabelled", "aaaaaaaa (step-1): engines held these weights before, as step-0")]
    moved = "bbbbbbbb (step-1): until now step-1 was the label of weights aaaaaaaa"
    assert labelled(B, a="step-1", b="step-1") == [("WeightsRelabelled", moved)]
    assert labelled(B, a="step-1", b="step-1") == []
