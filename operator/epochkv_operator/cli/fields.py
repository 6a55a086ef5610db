"""Where two JSON objects differ, as paths with their values."""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

ABSENT: Final[Any] = object()
_ITEM_KEYS: Final = ("name", "mountPath", "containerPort", "uid", "ip")
"""What the items of a list are told apart by."""
_SHOWN: Final = 120


@dataclass(frozen=True)
class Difference:
    """One field. `before` or `after` may be `ABSENT`."""

    steps: tuple[str | int, ...]
    path: str
    """As people write it: `spec.args[1]`."""
    before: Any
    after: Any

    def __str__(self) -> str:
        if self.before is ABSENT:
            return f"{self.path}: {_value(self.after)} (new)"
        if self.after is ABSENT:
            return f"{self.path}: {_value(self.before)} (removed)"
        return f"{self.path}: {_value(self.before)} -> {_value(self.after)}"


def differences(before: Any, after: Any) -> list[Difference]:
    """Every field that differs, in the order of `after`: also in lists, and in strings that hold JSON."""
    return list(_walk(before, after, (), "", deep=True))


def top_differences(before: Any, after: Any) -> list[Difference]:
    """Every field that differs, with lists and strings taken whole. Each can be `reverted`."""
    return list(_walk(before, after, (), "", deep=False))


def reverted(obj: Any, difference: Difference) -> Any:
    """`obj`, the side after, with one of the `top_differences` as it was before."""
    result = copy.deepcopy(obj)
    holder = result
    for step in difference.steps[:-1]:
        holder = holder[step]
    last = difference.steps[-1]
    if difference.before is ABSENT:
        del holder[last]
    else:
        holder[last] = copy.deepcopy(difference.before)
    return result


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _walk(before: Any, after: Any, steps: tuple[str | int, ...], path: str, *, deep: bool) -> Iterator[Difference]:
    if before is after or (before == after and before is not ABSENT):
        return
    known, wanted = (_opened(before), _opened(after)) if deep else (before, after)
    if isinstance(known, dict) and isinstance(wanted, dict):
        for key in (*wanted, *(key for key in known if key not in wanted)):
            here = f"{path}[{key}]" if "/" in key or "." in key else f"{path}.{key}"
            yield from _walk(known.get(key, ABSENT), wanted.get(key, ABSENT), (*steps, key), here.removeprefix("."), deep=deep)
    elif deep and isinstance(known, list) and isinstance(wanted, list) and (pairs := _pairs(known, wanted)) is not None:
        for name, index, one, other in pairs:
            yield from _walk(one, other, (*steps, index), f"{path}[{name}]", deep=deep)
    else:
        yield Difference(steps, path, before, after)


def _opened(value: Any) -> Any:
    """The object in a string of JSON, such as the connector's configuration among the arguments."""
    if isinstance(value, str) and value.startswith("{"):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _pairs(before: list[Any], after: list[Any]) -> list[tuple[Any, int, Any, Any]] | None:
    """Items that belong together, by name or by place; None for lists that can only be shown as a whole."""
    both = [*before, *after]
    key = next((key for key in _ITEM_KEYS if both and all(isinstance(item, dict) and key in item for item in both)), None)
    if key is not None:
        known = {item[key]: item for item in before}
        wanted = [(item[key], index, known.get(item[key], ABSENT), item) for index, item in enumerate(after)]
        gone = {item[key] for item in after}
        return wanted + [(item[key], index, item, ABSENT) for index, item in enumerate(before) if item[key] not in gone]
    if len(before) == len(after):
        return [(index, index, one, other) for index, (one, other) in enumerate(zip(before, after, strict=True))]
    return _moved(before, after) if all(isinstance(item, str) for item in both) else None


def _moved(before: list[str], after: list[str]) -> list[tuple[Any, int, Any, Any]]:
    """Words that came and went, such as arguments: what stands behind them only has another place."""
    found: list[tuple[Any, int, Any, Any]] = []
    matcher = difflib.SequenceMatcher(None, [_kind(word) for word in before], [_kind(word) for word in after], autojunk=False)
    for tag, start, end, first, last in matcher.get_opcodes():
        if tag == "equal":
            found += [(first + step, first + step, before[start + step], after[first + step]) for step in range(end - start)]
        else:
            found += [(place, place, before[place], ABSENT) for place in range(start, end)]
            found += [(place, place, ABSENT, after[place]) for place in range(first, last)]
    return found


def _kind(word: str) -> str:
    """Two configurations in JSON are one item that changed."""
    return "{" if isinstance(_opened(word), dict) else word
