"""A preview as text for people, as a unified diff, and as JSON."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from epochkv_operator.cli.fields import ABSENT, Difference
from epochkv_operator.cli.preview import Outcome, Step

Json = dict[str, Any]
_SIGNS = {"create": "+", "change": "~", "delete": "-"}


def text(outcomes: Sequence[Outcome]) -> str:
    """Field by field, with a last line that sums up."""
    lines = [line for outcome in outcomes for line in _outcome(outcome)]
    return "\n".join([*lines, summary(outcomes)])


def summary(outcomes: Sequence[Outcome]) -> str:
    steps = [step for outcome in outcomes for step in outcome.steps]
    counts = ", ".join(f"{sum(step.verb == verb for step in steps)} to {verb}" for verb in _SIGNS)
    rolls = sum(outcome.rolls for outcome in outcomes)
    pods = f"{rolls} pod{'s' if rolls > 1 else ''} would be replaced" if rolls else "no pod would be replaced"
    stuck = sum(outcome.problem is not None for outcome in outcomes)
    return f"Plan: {counts}; {pods}" + (f"; {stuck} with a problem" if stuck else "") + "."


def _outcome(outcome: Outcome) -> Iterator[str]:
    kind, namespace, name = outcome.subject.key
    if outcome.subject.source is None:
        state = "is in no file; its pool changes"
    elif outcome.subject.before is None:
        state = f"new ({outcome.subject.source})"
    else:
        state = f"{'changes' if outcome.changes else 'stays as it is'} ({outcome.subject.source})"
    yield f"{kind} {namespace}/{name}: {state}"
    yield from (f"    spec.{change}" for change in outcome.changes)
    yield from (f"    note: {note}" for note in outcome.notes)
    if outcome.problem is not None:
        yield f"  ! {outcome.problem}"
    for step in outcome.steps:
        yield from _step(step)
    yield ""


def _step(step: Step) -> Iterator[str]:
    kind, _, name = step.key
    yield f"  {_SIGNS[step.verb]} {step.verb} {kind} {name}{_pods(step)}"
    if step.causes:
        yield f"      because of {', '.join(step.causes)}"
    yield from (f"      {change}" for change in step.changes)


def _pods(step: Step) -> str:
    if step.rolls:
        return f": replaces {step.rolls} pod{'s' if step.rolls > 1 else ''}, {step.at_once}"
    replicas = (step.after or {}).get("spec", {}).get("replicas") if step.verb == "create" else None
    return f": starts {replicas} pod{'s' if replicas > 1 else ''}" if replicas else ""


def diff(outcomes: Sequence[Outcome]) -> str:
    """A unified diff of the operator's objects as YAML."""
    parts: list[str] = []
    for outcome in outcomes:
        for step in outcome.steps:
            name = "/".join(step.key)
            before, after = (_yaml(obj) if obj is not None else [] for obj in (step.before, step.after))
            names = ("/dev/null" if step.before is None else f"a/{name}", "/dev/null" if step.after is None else f"b/{name}")
            parts += difflib.unified_diff(before, after, *names)
    return "".join(line if line.endswith("\n") else f"{line}\n" for line in parts)


def _yaml(obj: Json) -> list[str]:
    metadata = {key: value for key, value in obj["metadata"].items() if key not in ("managedFields", "resourceVersion", "generation")}
    shown = {key: value for key, value in {**obj, "metadata": metadata}.items() if key != "status"}
    written: str = yaml.safe_dump(shown, sort_keys=False, width=4096)
    return written.splitlines(keepends=True)


def as_json(outcomes: Sequence[Outcome]) -> str:
    """For scripts."""
    return json.dumps({"podsReplaced": sum(outcome.rolls for outcome in outcomes), "objects": [_json(one) for one in outcomes]}, indent=2)


def _json(outcome: Outcome) -> Json:
    kind, namespace, name = outcome.subject.key
    return {
        "kind": kind,
        "namespace": namespace,
        "name": name,
        "file": outcome.subject.source,
        "new": outcome.subject.before is None,
        "problem": outcome.problem,
        "notes": list(outcome.notes),
        "changes": [_change(change, "spec.") for change in outcome.changes],
        "steps": [
            {
                "do": step.verb,
                "kind": step.key[0],
                "name": step.key[2],
                "podsReplaced": step.rolls,
                "because": list(step.causes),
                "changes": [_change(change) for change in step.changes],
            }
            for step in outcome.steps
        ],
    }


def _change(change: Difference, prefix: str = "") -> Json:
    found: Json = {"path": prefix + change.path}
    if change.before is not ABSENT:
        found["before"] = change.before
    if change.after is not ABSENT:
        found["after"] = change.after
    return found
