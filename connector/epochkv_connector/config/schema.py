"""What one key of the configuration may hold, and one sentence for what is wrong with it.

msgspec says "Expected `int`, got `str` - at `$.local`"; whoever reads that in the log of a launcher has to guess which
value that was and what would do instead. Every sentence here names the key, the value, what is allowed and a remedy; a
key that does not exist is answered with the nearest one that does. The same table is printed as the reference page
(`reference.py`), so what a key does is said here and nowhere else. Pure: no vLLM, no I/O.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

MAX_SHOWN = 80
HOST_PORT = re.compile(r"(?:\[[0-9A-Fa-f:.%]+\]|[^\s\[\]/@;,]+):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class Rule:
    """What one key may hold.

    Attributes:
        allowed: follows "it must be" in a sentence.
        fits: whether a value is fine.
        remedy: what to do; empty: nothing beyond what `allowed` says.
        optional: may be absent or null.
        does: what the key is for, in Markdown, for the reference page.
        unit: of a number.
    """

    allowed: str
    fits: Callable[[Any], bool]
    remedy: str = ""
    optional: bool = True
    does: str = ""
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A nested object.

    Attributes:
        remedy: what leaving it out means; for the errors of its keys, too.
        does: as in `Rule`.
    """

    keys: Mapping[str, Rule | Table]
    remedy: str = ""
    optional: bool = True
    does: str = ""


def whole(low: int, high: int, unit: str, remedy: str = "", *, does: str, optional: bool = True) -> Rule:
    """A whole number; `true` is none, nor is `1.0`."""
    return Rule(
        f"a whole number of {unit} from {low} to {high}",
        lambda value: isinstance(value, int) and not isinstance(value, bool) and low <= value <= high,
        remedy,
        optional,
        does,
        unit,
    )


def number(low: float, high: float, unit: str, *, does: str, above: bool = False) -> Rule:
    """A finite number from `low` (or above it) to `high`."""

    def fits(value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            return False
        return (low < value if above else low <= value) and value <= high

    bounds = f"{'above' if above else 'from'} {low:g}{',' if above else ''} {'at most' if above else 'to'} {high:g}"
    return Rule(f"a number of {unit} {bounds}", fits, does=does, unit=unit)


def choice(*words: str, does: str) -> Rule:
    """One of a few words."""
    return Rule(" or ".join(f'"{word}"' for word in words), lambda value: isinstance(value, str) and value in words, does=does)


def flag(does: str) -> Rule:
    """A truth value."""
    return Rule("true or false", lambda value: isinstance(value, bool), does=does)


def text(allowed: str, fits: Callable[[str], bool], *, does: str, remedy: str = "", optional: bool = True) -> Rule:
    """A string that `fits`."""
    return Rule(allowed, lambda value: isinstance(value, str) and fits(value), remedy, optional, does)


def is_host_port(value: str) -> bool:
    """`host:port` or `[IPv6]:port`, with a port that exists."""
    match = HOST_PORT.fullmatch(value)
    return match is not None and 0 < int(match["port"]) < 65536


def shown(value: Any) -> str:
    """A value in an error: as the JSON it was, short, on one line."""
    if isinstance(value, str):
        rendered = repr(value)
    else:
        try:
            rendered = json.dumps(value)
        except (TypeError, ValueError, RecursionError):
            rendered = f"a {type(value).__name__}"
    return rendered if len(rendered) <= MAX_SHOWN else rendered[:MAX_SHOWN] + "..."


def problem(document: Mapping[str, Any], table: Table) -> tuple[str, str] | None:
    """The first thing that is wrong: the top-level key it is under, and a sentence. None: nothing."""
    return next(_problems(document, table, table, ""), None)


def _problems(document: Mapping[str, Any], table: Table, root: Table, path: str) -> Iterator[tuple[str, str]]:
    for key, value in document.items():
        if key not in table.keys:
            yield _top(path, str(key)), _unknown(str(key), value, table, root, path)
    for key, rule in table.keys.items():
        name = f"{path}{key}"
        if document.get(key) is None:
            if not rule.optional:
                state = "null" if key in document else "missing"
                allowed = rule.allowed if isinstance(rule, Rule) else f"an object with the keys {', '.join(rule.keys)}"
                yield _top(path, key), _sentence(name, state, allowed, rule.remedy or table.remedy)
            elif key in document and not isinstance(rule, Table) and not rule.fits(None):
                yield _top(path, key), _sentence(name, "null", rule.allowed, rule.remedy or "leave the key out for its default")
        elif isinstance(rule, Rule):
            if not rule.fits(document[key]):
                yield _top(path, key), _sentence(name, shown(document[key]), rule.allowed, _hint(document[key], rule) or rule.remedy)
        elif not isinstance(document[key], Mapping):
            allowed = f"an object with the keys {', '.join(rule.keys)}"
            yield _top(path, key), _sentence(name, shown(document[key]), allowed, rule.remedy)
        else:
            yield from _problems(document[key], rule, root, f"{name}.")


def _top(path: str, key: str) -> str:
    return path.split(".", 1)[0] if path else key


def _sentence(name: str, state: str, allowed: str, remedy: str) -> str:
    return f"{name} is {state}; it must be {allowed}" + (f"; {remedy}" if remedy else "")


def _hint(value: Any, rule: Rule) -> str:
    """What a value of the wrong kind probably means."""
    if isinstance(value, str):
        try:
            meant = json.loads(value)
        except ValueError:
            return ""
        return "write it without quotes" if rule.fits(meant) else ""
    if isinstance(value, float) and value.is_integer() and rule.fits(int(value)):
        return "write it without a decimal point"
    return ""


def _unknown(key: str, value: Any, table: Table, root: Table, path: str) -> str:
    known = f"the keys{f' of {path[:-1]}' if path else ''} are: {', '.join(sorted(table.keys))}"
    nearest = _nearest(key, table, root, path)
    meant = f"did you mean {nearest}? " if nearest else ""
    return f"{shown(path + key)[1:-1]} is {shown(value)}, but there is no such key; {meant}{known}"


def _nearest(key: str, table: Table, root: Table, path: str) -> str | None:
    """The full name of the key that was probably meant: of this table, else of any."""
    own = difflib.get_close_matches(key.lower(), list(table.keys), n=1)
    everywhere = dict(_names(root, ""))
    same = [name for name, last in everywhere.items() if last == key.lower()]
    if same and not own:
        return same[0]
    if own:
        return path + own[0]
    close = difflib.get_close_matches(key.lower(), list(everywhere.values()), n=1)
    return next((name for name, last in everywhere.items() if close and last == close[0]), None)


def _names(table: Table, path: str) -> Iterator[tuple[str, str]]:
    for key, rule in table.keys.items():
        yield f"{path}{key}", key
        if isinstance(rule, Table):
            yield from _names(rule, f"{path}{key}.")
