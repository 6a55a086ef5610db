"""The API of EpochKV: `KVCachePool` and `InferenceEngine`, group `epochkv.io`, version `v1alpha1`.

Live objects are parsed once, at the edge, with `parse_pool` and `parse_engine`; everything behind works on frozen models.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

from pydantic import ValidationError

from epochkv_operator.api.base import ApiModel
from epochkv_operator.api.engine import InferenceEngine
from epochkv_operator.api.pool import KVCachePool

__all__ = ["InferenceEngine", "InvalidObject", "KVCachePool", "parse_engine", "parse_pool"]

_Object = TypeVar("_Object", bound=ApiModel)
_KNOWN: Final = ("apiVersion", "kind", "metadata", "spec", "status")
_SAID: Final = {"missing": "it is required", "extra_forbidden": "unknown field"}
"""Where Kubernetes has other words than pydantic."""


class InvalidObject(ValueError):
    """An object that does not fit the schema; the text names object, field and problem.

    Of a live object: the CRDs that are installed are not those of this version.
    """


def parse_pool(obj: Mapping[str, Any]) -> KVCachePool:
    """A KVCachePool from its JSON form. Raises `InvalidObject`."""
    return _parse(KVCachePool, obj)


def parse_engine(obj: Mapping[str, Any]) -> InferenceEngine:
    """An InferenceEngine from its JSON form. Raises `InvalidObject`."""
    return _parse(InferenceEngine, obj)


def _parse(model: type[_Object], obj: Mapping[str, Any]) -> _Object:
    try:
        return model.model_validate({key: obj[key] for key in _KNOWN if key in obj})
    except ValidationError as error:
        metadata = obj.get("metadata") or {}
        where = f"{model.__name__} {metadata.get('namespace', 'default')}/{metadata.get('name', '')}"
        # Without the values: one may be a secret.
        found = [(_path(one["loc"]), _SAID.get(one["type"]) or one["msg"].removeprefix("Value error, ")) for one in error.errors()]
        problems = dict.fromkeys(f"{path}: {text}" for path, text in found)
        raise InvalidObject(f"{where}: {'; '.join(problems)}") from error


def _path(steps: Sequence[int | str]) -> str:
    """As the API server writes it: `spec.args[1]`. Steps that pydantic adds for the branches of a union are left out."""
    names = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps if step not in ("int", "str", "constrained-str")]
    return "".join(names).removeprefix(".")
