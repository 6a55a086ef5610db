"""The API of EpochKV: `KVCachePool` and `InferenceEngine`, group `epochkv.io`, version `v1alpha1`.

Live objects are parsed once, at the edge, with `parse_pool` and `parse_engine`; everything behind works on frozen models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from epochkv_operator.api.base import ApiModel
from epochkv_operator.api.engine import InferenceEngine
from epochkv_operator.api.pool import KVCachePool

__all__ = ["InferenceEngine", "InvalidObject", "KVCachePool", "parse_engine", "parse_pool"]

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


def _parse(model: type[_Object], obj: Mapping[str, Any]) -> _Object:
    known = {key: obj[key] for key in ("apiVersion", "kind", "metadata", "spec", "status") if key in obj}
    try:
        return model.model_validate(known)
    except ValidationError as error:
        metadata = obj.get("metadata") or {}
        where = f"{model.__name__} {metadata.get('namespace', 'default')}/{metadata.get('name', '')}"
        raise InvalidObject(f"{where}: {_sentence(error)}") from error


def _sentence(error: ValidationError) -> str:
    problems = []
    for problem in error.errors(include_url=False):
        path = ".".join(str(step) for step in problem["loc"] if not str(step).startswith(("function-", "constrained-")))
        text = problem["msg"].removeprefix("Value error, ")
        problems.append(f"{path}: {text}" if path and path not in text else text)
    return "; ".join(problems)
