"""The API of EpochKV: `KVCachePool` and `InferenceEngine`, group `epochkv.io`, version `v1alpha1`.

Live objects are parsed once, at the edge, with `parse_pool` and `parse_engine`; everything behind works on frozen models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

from pydantic import ValidationError

from epochkv_operator.api.base import ADMISSION, ApiModel
from epochkv_operator.api.engine import InferenceEngine
from epochkv_operator.api.pool import KVCachePool

__all__ = ["InferenceEngine", "InvalidObject", "KVCachePool", "admit", "parse_engine", "parse_pool"]

_Object = TypeVar("_Object", bound=ApiModel)


class InvalidObject(ValueError):
    """An object that this operator cannot act on; the text names object, field, problem and fix.

    The CRDs of this version refuse such objects, so it was stored under another version of them.
    """


def parse_pool(obj: Mapping[str, Any]) -> KVCachePool:
    """A KVCachePool from its JSON form. Raises `InvalidObject`."""
    return _parse(KVCachePool, obj)


def parse_engine(obj: Mapping[str, Any]) -> InferenceEngine:
    """An InferenceEngine from its JSON form. Raises `InvalidObject`."""
    return _parse(InferenceEngine, obj)


def admit(obj: Mapping[str, Any]) -> KVCachePool | InferenceEngine:
    """An object that a user wants to apply, judged as the API server judges it, as far as that needs no cluster.

    Raises:
        InvalidObject: also for what `parse_pool` and `parse_engine` still take, because an older CRD took it.
        KeyError: a kind that is not ours.
    """
    model: type[KVCachePool] | type[InferenceEngine] = {one.__name__: one for one in (KVCachePool, InferenceEngine)}[obj["kind"]]
    unknown = [key for key in obj if key not in _KNOWN]
    if unknown:
        raise InvalidObject(f"{_where(model, obj)}: {unknown[0]}: unknown field")
    return _parse(model, obj, ADMISSION)


_KNOWN: Final = ("apiVersion", "kind", "metadata", "spec", "status")
_SCALARS: Final = ("int", "str", "constrained-str")
"""Steps that pydantic adds for the branches of a union."""
_SHOWN: Final = ("literal_error", "greater_than_equal", "less_than_equal", "int_type", "bool_type")
"""Errors of fields that hold no secrets, and are clearer with the value."""
_OBJECT: Final = "must be an object, with fields of its own"
_SAID: Final = {
    "missing": "it is required",
    "extra_forbidden": "unknown field",
    "int_type": "must be a whole number",
    "string_type": "must be text: put it in quotes",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "dict_type": _OBJECT,
    "model_type": _OBJECT,
    "model_attributes_type": _OBJECT,
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
}


def _where(model: type[ApiModel], obj: Mapping[str, Any]) -> str:
    metadata = obj.get("metadata") or {}
    return f"{model.__name__} {metadata.get('namespace', 'default')}/{metadata.get('name', '')}"


def _parse(model: type[_Object], obj: Mapping[str, Any], context: Mapping[str, Any] | None = None) -> _Object:
    known = {key: obj[key] for key in _KNOWN if key in obj}
    try:
        return model.model_validate(known, context=dict(context or {}))
    except ValidationError as error:
        raise InvalidObject(f"{_where(model, obj)}: {_sentence(error)}") from error


def _sentence(error: ValidationError) -> str:
    problems = []
    found = error.errors(include_url=False)
    wrong_items = {_path(problem["loc"]).rpartition("[")[0] for problem in found}
    for problem in found:
        path = _path(problem["loc"])
        if problem["type"] == "too_short" and path in wrong_items:
            continue  # its items were given, and are wrong
        text = _SAID.get(problem["type"], "").format(**problem.get("ctx", {})) or problem["msg"].removeprefix("Value error, ")
        if problem["type"] in _SHOWN:
            text += f", not {problem['input']!r}"
        problems.append(f"{path}: {text}" if path and path not in text else text)
    return "; ".join(dict.fromkeys(problems))


def _path(steps: Sequence[int | str]) -> str:
    """As the API server writes it: `spec.args[1]`."""
    path = ""
    for step in steps:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step not in _SCALARS and not step.startswith(("function-", "constrained-")):
            path += f".{step}"
    return path.removeprefix(".")
