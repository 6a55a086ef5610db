"""Says in one sentence what is wrong with a key of the configuration. The models that declare the keys provide the words.

msgspec says "Expected `int`, got `str` - at `$.local`". A user who reads that in a launcher's log has to guess which value it
was and what to write instead. Every sentence here names the key, the value, what is allowed and a remedy; an unknown key is
answered with the nearest known one. A field declares its key once (`msgspec.Meta`): type, bounds, description, and in `extra`
what msgspec has no term for:

- `allowed`: of a text, what follows "it must be"; `fits`: whether a text is fine
- `remedy`: what to do, or what leaving an object out means; `unit`: of a number

The reference page is generated from the same fields (`reference`). Pure: no vLLM, no I/O.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import inspect

MAX_SHOWN = 80
HOST_PORT = re.compile(r"(?:\[[0-9A-Fa-f:.%]+\]|[^\s\[\]/@;,]+):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class Key:
    """What one key may hold.

    Attributes:
        kind: in words, with the unit of a number.
        allowed: follows "it must be" in a sentence.
        fits: whether a value is fine; of an object, whether it is one.
        remedy: what to do; empty: nothing beyond what `allowed` says.
        required: may neither be absent nor null.
        default: None where there is none.
        does: what the key is for, in Markdown.
        keys: of an object.
    """

    kind: str
    allowed: str
    fits: Callable[[Any], bool]
    remedy: str
    required: bool
    default: Any
    does: str
    keys: Mapping[str, Key] | None = None


def keys_of(model: type[msgspec.Struct]) -> dict[str, Key]:
    """The keys of a model, in its order."""
    found = inspect.type_info(model)
    assert isinstance(found, inspect.StructType)
    return _keys_of(found)


def _keys_of(model: inspect.StructType) -> dict[str, Key]:
    return {field.name: _key(field) for field in model.fields}


def _key(field: inspect.Field) -> Key:
    meta = field.type
    assert isinstance(meta, inspect.Metadata), f"{field.name} has no description"
    words, inner = meta.extra or {}, meta.type
    kinds = inner.types if isinstance(inner, inspect.UnionType) else (inner,)
    one = next(kind for kind in kinds if not isinstance(kind, inspect.NoneType))
    kind, allowed, fits = _allowed(one, words)
    nullable = len(kinds) > 1 and not isinstance(one, inspect.StructType)
    return Key(
        kind=", ".join(filter(None, (kind, words.get("unit")))),
        allowed=allowed,
        fits=(lambda value: value is None or fits(value)) if nullable else fits,
        remedy=words.get("remedy", ""),
        required=field.required,
        default=None if field.required else field.default,
        does=(meta.extra_json_schema or {})["description"],
        keys=_keys_of(one) if isinstance(one, inspect.StructType) else None,
    )


def _allowed(kind: inspect.Type, words: Mapping[str, Any]) -> tuple[str, str, Callable[[Any], bool]]:
    """The type's name, the values it may hold, and whether a value fits. `true` is not a number, and `1.0` is not a whole one."""
    match kind:
        case inspect.BoolType():
            return "boolean", "true or false", lambda value: isinstance(value, bool)
        case inspect.IntType():
            low, high = _bounds(kind)
            allowed = f"a whole number of {words['unit']} from {low} to {high}"
            return "integer", allowed, lambda value: type(value) is int and low <= value <= high
        case inspect.FloatType():
            low, high = _bounds(kind)
            bounds = f"from {low:g} to {high:g}" if kind.gt is None else f"above {kind.gt:g}, at most {high:g}"
            return "number", f"a number of {words['unit']} {bounds}", lambda value: type(value) in (int, float) and low <= value <= high
        case inspect.LiteralType(values=values):
            return "string", " or ".join(f'"{word}"' for word in values), lambda value: isinstance(value, str) and value in values
        case inspect.StructType() | inspect.DictType():
            allowed = words["allowed"] if isinstance(kind, inspect.DictType) else f"an object with the keys {_names(kind)}"
            return "object", allowed, lambda value: isinstance(value, Mapping)
    fits = words.get("fits", lambda value: True)
    return "string", words["allowed"], lambda value: isinstance(value, str) and fits(value)


def _names(model: inspect.StructType) -> str:
    return ", ".join(field.name for field in model.fields)


def _bounds(kind: inspect.IntType | inspect.FloatType) -> tuple[float, float]:
    """The least and the largest value."""
    least = math.nextafter(kind.gt, math.inf) if kind.gt is not None else kind.ge
    assert least is not None, "a number without a least value"
    assert kind.le is not None, "a number without a largest value"
    return least, kind.le


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


def problem(document: Mapping[str, Any], keys: Mapping[str, Key]) -> tuple[str, str] | None:
    """The first thing that is wrong: the top-level key it is under, and a sentence. None: nothing."""
    return next(_problems(document, keys, keys, "", ""), None)


def _problems(
    document: Mapping[str, Any], keys: Mapping[str, Key], root: Mapping[str, Key], path: str, remedy: str
) -> Iterator[tuple[str, str]]:
    for name, value in document.items():
        if name not in keys:
            yield _top(path, str(name)), _unknown(str(name), value, keys, root, path)
    for name, key in keys.items():
        value = document.get(name)
        if name in document and key.keys is not None and isinstance(value, Mapping):
            yield from _problems(value, key.keys, root, f"{path}{name}.", key.remedy)
        elif (said := _wrong(name in document, value, key, remedy)) is not None:
            yield _top(path, name), f"{path}{name} {said}"


def _wrong(given: bool, value: Any, key: Key, remedy: str) -> str | None:
    """What is wrong with one value. `remedy`: of the object that the key is in."""
    if value is None and key.required:
        return _sentence("null" if given else "missing", key.allowed, key.remedy or remedy)
    if not given or (value is None and key.keys is not None) or key.fits(value):
        return None
    if value is None:
        return _sentence("null", key.allowed, key.remedy or "leave the key out for its default")
    return _sentence(shown(value), key.allowed, _hint(value, key) or key.remedy)


def _top(path: str, key: str) -> str:
    return path.split(".", 1)[0] if path else key


def _sentence(state: str, allowed: str, remedy: str) -> str:
    return f"is {state}; it must be {allowed}" + (f"; {remedy}" if remedy else "")


def _hint(value: Any, key: Key) -> str:
    """What a value of the wrong kind probably means."""
    if isinstance(value, str):
        try:
            meant = json.loads(value)
        except (ValueError, RecursionError):
            return ""
        return "write it without quotes" if key.fits(meant) else ""
    if isinstance(value, float) and value.is_integer() and key.fits(int(value)):
        return "write it without a decimal point"
    return ""


def _unknown(name: str, value: Any, keys: Mapping[str, Key], root: Mapping[str, Key], path: str) -> str:
    known = f"the keys{f' of {path[:-1]}' if path else ''} are: {', '.join(sorted(keys))}"
    nearest = _nearest(name, keys, root, path)
    meant = f"did you mean {nearest}? " if nearest else ""
    return f"{shown(path + name)[1:-1]} is {shown(value)}, but there is no such key; {meant}{known}"


def _nearest(name: str, keys: Mapping[str, Key], root: Mapping[str, Key], path: str) -> str | None:
    """The full name of the key that was probably meant: of this object, else of any."""
    own = difflib.get_close_matches(name.lower(), list(keys), n=1)
    everywhere = {full: full.rpartition(".")[2] for full, _ in every(root)}
    same = [full for full, last in everywhere.items() if last == name.lower()]
    if same and not own:
        return same[0]
    if own:
        return path + own[0]
    close = difflib.get_close_matches(name.lower(), list(everywhere.values()), n=1)
    return next((full for full, last in everywhere.items() if close and last == close[0]), None)


def every(keys: Mapping[str, Key], path: str = "") -> Iterator[tuple[str, Key]]:
    """All keys with their full names; an object comes before its keys."""
    for name, key in keys.items():
        yield f"{path}{name}", key
        if key.keys is not None:
            yield from every(key.keys, f"{path}{name}.")
