"""Does a live object still say what was applied? A subset comparison: the server adds defaults, other controllers add fields of
their own."""

from __future__ import annotations

from typing import Any, Final

from epochkv_operator.api import quantity
from epochkv_operator.planning.context import Json
from epochkv_operator.planning.names import HASH_ANNOTATION

_KEYS: Final = ("name", "mountPath", "containerPort", "uid", "ip")
_QUANTITIES: Final = ("limits", "requests", "sizeLimit")


def difference(desired: Json, live: Json) -> str | None:
    """Where `live` differs from `desired`, as a path, or None when applying `desired` would change nothing.

    Fields that an earlier version applied and this one does not are invisible here; the hash over the whole desired object, kept as an
    annotation, gives those away.
    """
    annotation = (live["metadata"].get("annotations") or {}).get(HASH_ANNOTATION)
    if annotation != desired["metadata"]["annotations"][HASH_ANNOTATION]:
        return "what the operator wants has changed"
    # Items of a list come without apiVersion and kind, and the caller has matched those already.
    wanted = {key: value for key, value in desired.items() if key not in ("apiVersion", "kind")}
    found = _differs(wanted, live, "")
    return f"{found[1:]} was changed by somebody else" if found is not None else None


def _differs(desired: Any, live: Any, path: str) -> str | None:
    if live is None:
        return path if desired not in ({}, [], "", 0, False, None) else None
    if isinstance(desired, dict):
        return _first(desired, live, path) if isinstance(live, dict) else path
    if isinstance(desired, list):
        return _differs_list(desired, live, path) if isinstance(live, list) else path
    return None if desired == live or _same_quantity(desired, live, path) else path


def _first(desired: Json, live: Json, path: str) -> str | None:
    for key, value in desired.items():
        found = _differs(value, live.get(key), f"{path}.{key}")
        if found is not None:
            return found
    return None


def _differs_list(desired: list[Any], live: list[Any], path: str) -> str | None:
    key = next((key for key in _KEYS if desired and all(isinstance(item, dict) and key in item for item in desired)), None)
    if key is not None:
        known = {item.get(key): item for item in live if isinstance(item, dict)}
        pairs = [(item, known.get(item[key]), str(item[key])) for item in desired]
    elif len(desired) == len(live):
        pairs = [(item, other, str(index)) for index, (item, other) in enumerate(zip(desired, live, strict=True))]
    else:
        return path
    for item, other, name in pairs:
        found = f"{path}[{name}]" if other is None else _differs(item, other, f"{path}[{name}]")
        if found is not None:
            return found
    return None


def _same_quantity(desired: Any, live: Any, path: str) -> bool:
    if not any(part in _QUANTITIES for part in path.split(".")):
        return False
    try:
        return quantity.parse(desired) == quantity.parse(live)
    except (ValueError, TypeError):
        return False
