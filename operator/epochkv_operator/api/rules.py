"""What the API server would refuse by the rules of the CRDs, without an API server: for `epochkv plan` on files alone.

The rules are those of the CRDs themselves, in CEL. Of what Kubernetes adds to CEL, the functions that they use are here.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any, Final

from celpy import Environment, Runner
from celpy.adapter import json_to_cel
from celpy.celtypes import BoolType, DoubleType, IntType, ListType, StringType
from celpy.evaluation import CELEvalError

from epochkv_fence import quantity
from epochkv_operator.api.base import Json
from epochkv_operator.api.generate import CRDS, manifest

_LARGEST: Final = 2**63 - 1


def violations(obj: Json) -> list[str]:
    """What is wrong with a new object that fits the schema, as `field: text`."""
    schema = _schemas()[obj["kind"]]
    return [f"{path.removeprefix('.')}: {text}" for path, text in _violations(schema, _with_defaults(schema, obj), "")]


@cache
def _schemas() -> dict[str, Json]:
    return {crd.resource.kind: manifest(crd)["spec"]["versions"][0]["schema"]["openAPIV3Schema"] for crd in CRDS}


def _with_defaults(schema: Json, value: Any) -> Any:
    if isinstance(value, dict) and "properties" in schema:
        fields = schema["properties"]
        value = {name: item for name, item in value.items() if item is not None}
        value = {name: field["default"] for name, field in fields.items() if "default" in field} | value
        return {name: _with_defaults(fields.get(name, {}), item) for name, item in value.items()}
    if isinstance(value, list):
        return [_with_defaults(schema.get("items", {}), item) for item in value]
    if isinstance(value, int) and abs(value) > _LARGEST:  # more than CEL has, and beyond every bound of ours
        return _LARGEST if value > 0 else -_LARGEST
    return value


def _violations(schema: Json, value: Any, path: str) -> Iterator[tuple[str, str]]:
    for rule in schema.get("x-kubernetes-validations", ()):
        # Those with `oldSelf` are about changes.
        if "oldSelf" not in rule["rule"] and not _evaluated(rule["rule"], value):
            text = rule["message"] if "messageExpression" not in rule else str(_evaluated(rule["messageExpression"], value))
            yield path + rule.get("fieldPath", ""), text
    if isinstance(value, dict):
        for name, item in value.items():
            field = schema.get("properties", {}).get(name, schema.get("additionalProperties", {}))
            yield from _violations(field, item, f"{path}.{name}")
    elif isinstance(value, list):
        keys, seen = schema.get("x-kubernetes-list-map-keys", ()), list[Any]()
        for index, item in enumerate(value):
            own = {key: item.get(key) for key in keys} if keys else item
            if own in seen and schema.get("x-kubernetes-list-type") in ("map", "set"):
                yield f"{path}[{index}]", f"Duplicate value: {own}"
            seen.append(own)
            yield from _violations(schema.get("items", {}), item, f"{path}[{index}]")


def _evaluated(expression: str, value: Any) -> Any:
    try:
        return _program(expression).evaluate({"self": json_to_cel(value)})
    except CELEvalError as error:
        raise AssertionError(f"a rule of ours cannot be evaluated: {expression}: {error}") from error


@cache
def _program(expression: str) -> Runner:
    environment = Environment()
    return environment.program(environment.compile(expression), functions=_KUBERNETES)


def _is_quantity(value: StringType) -> BoolType:
    try:
        quantity.parse(value)
    except ValueError:
        return BoolType(False)
    return BoolType(True)


_KUBERNETES: Final[dict[str, Any]] = {
    "isQuantity": _is_quantity,
    "quantity": lambda value: DoubleType(float(quantity.parse(value))),
    "compareTo": lambda one, other: IntType((one > other) - (one < other)),
    "split": lambda value, separator: ListType(map(StringType, value.split(separator))),
    "format": lambda text, values: StringType(text.replace("%d", "%s") % tuple(values)),
}
"""https://kubernetes.io/docs/reference/using-api/cel/"""
