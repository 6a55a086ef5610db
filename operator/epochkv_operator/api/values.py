"""Values with a rule of their own: sizes, addresses, names, arguments.

Each rule stands here once, as CEL for the API server and as Python for the models, and refuses with a sentence. A `pattern` of the
schema would refuse with the pattern alone. Field and value stand before the sentence: the API server and `InvalidObject` add them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Final

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationInfo
from pydantic_core import CoreSchema, core_schema

from epochkv_fence import quantity
from epochkv_operator.api.base import NAME_MAX_LENGTH, NAME_PATTERN, Json, admitted, int_or_string, rule


@dataclass(frozen=True)
class Checked:
    """A rule on one value, for `Annotated`.

    `holds` says the same as `cel`. `said` shows the value in the message, as `expression` does for the API server; without it the message
    stands alone. `since_stored`: an older CRD did not have the rule, so only admission refuses.
    """

    cel: str
    holds: Callable[[Any], bool]
    message: str
    expression: str | None = None
    said: Callable[[Any], str] | None = None
    reason: str = "FieldValueInvalid"
    since_stored: bool = False

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> Json:
        found = handler(schema)
        entry = rule(self.cel, self.message, expression=self.expression, reason=self.reason)
        return {**found, "x-kubernetes-validations": [*found.get("x-kubernetes-validations", ()), entry]}

    def _check(self, value: Any, info: ValidationInfo) -> Any:
        if (admitted(info) or not self.since_stored) and not self.holds(value):
            raise ValueError(self.said(value) if self.said is not None else self.message)
        return value


def shown(message: str) -> str:
    """A messageExpression: the value, then what is wrong. The API server itself shows the value of few types."""
    return f"\"'%s' {message}\".format([self])"


def matching(pattern: str, message: str, *, since_stored: bool = False) -> Checked:
    """A string that `pattern` (RE2, from `^` to `$`) matches."""
    known = re.compile(pattern, re.ASCII)
    return Checked(
        f"self.matches(r'{pattern}')",
        lambda value: known.fullmatch(value) is not None,
        message,
        shown(message),
        lambda value: f"'{value}' {message}",
        since_stored=since_stored,
    )


_LARGEST: Final = 2**50
_TOO_LARGE: Final = "is above 1Pi: check the unit; give a size such as 64Gi"


def _quantity(smallest: int, text: str, message: str) -> tuple[Checked, Checked]:
    """The lower bound, which every CRD has had, and the upper one."""

    def said(value: Any) -> str:
        return f"'{value}' {message}"

    def at_least(value: int | str) -> bool:
        try:
            return quantity.parse(value) >= smallest
        except ValueError:
            return False

    return (
        Checked(
            f"type(self) == int ? self >= {smallest} : (isQuantity(self) && quantity(self).compareTo(quantity('{text}')) >= 0)",
            at_least,
            message,
            shown(message),
            said,
        ),
        Checked(
            f"type(self) == int ? self <= {_LARGEST} : (!isQuantity(self) || quantity(self).compareTo(quantity('1Pi')) <= 0)",
            lambda value: quantity.parse(value) <= _LARGEST,
            _TOO_LARGE,
            shown(_TOO_LARGE),
            lambda value: f"'{value}' {_TOO_LARGE}",
            since_stored=True,
        ),
    )


_SIZE: Final = _quantity(2**20, "1Mi", "must be a Kubernetes quantity of at least 1Mi, such as 64Gi")
_AMOUNT: Final = _quantity(0, "0", "must be a Kubernetes quantity that is not negative, such as 2 or 16Gi")
_Quantity = Annotated[int | Annotated[str, Field(max_length=32)], int_or_string(32)]
Size = Annotated[_Quantity, _SIZE[0], _SIZE[1]]
"""Bytes, as an integer or a quantity."""
Amount = Annotated[_Quantity, _AMOUNT[0], _AMOUNT[1]]
"""An amount of a compute resource."""

_HOST: Final = r"([a-zA-Z0-9]([-a-zA-Z0-9.]*[a-zA-Z0-9.])?|\[[0-9a-fA-F:.]+\])"
_PORT: Final = "([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
_HOST_PORT: Final = f"{_HOST}:{_PORT}"
HostPort = Annotated[
    str,
    Field(min_length=1, max_length=253),
    matching(f"^{_HOST_PORT}$", "must be host:port without a scheme, such as etcd-0.example:2379", since_stored=True),
]
MasterAddress = Annotated[
    str,
    Field(min_length=1, max_length=1024),
    matching(
        f"^({_HOST_PORT}|etcd://{_HOST_PORT}(;{_HOST_PORT})*)$",
        "must be host:port, such as mooncake.example:50051, or etcd://host:port;host:port",
        since_stored=True,
    ),
]
MetadataServer = Annotated[
    str,
    Field(min_length=1, max_length=1024),
    matching(
        rf"^(P2PHANDSHAKE|([a-z]+://)?{_HOST_PORT}([;,]{_HOST_PORT})*(/\S*)?)$",
        "must be P2PHANDSHAKE, or host:port with a scheme and a path where it has them, such as http://mooncake.example:8080/metadata",
        since_stored=True,
    ),
]
Image = Annotated[
    str, Field(min_length=1, max_length=512), matching(r"^\S+$", "has a blank: give one image, such as registry.example/engine:1")
]
_WORD: Final = r"^[^\s-]\S*$"
ModelName = Annotated[
    str, Field(min_length=1, max_length=512), matching(_WORD, "must be one word that does not begin with '-', such as Qwen/Qwen3-8B")
]
Revision = Annotated[
    str, Field(min_length=1, max_length=128), matching(_WORD, "must be one word that does not begin with '-': a branch, a tag or a commit")
]
ModelSource = Annotated[
    str,
    Field(min_length=1, max_length=1024),
    matching(_WORD, "must be one word that does not begin with '-': a path in the pod, or a repository"),
]
Device = Annotated[
    str,
    Field(min_length=1, max_length=64),
    matching(r"^[^\s,]+$", "must be one device, such as mlx5_0: give each device as an item of its own"),
]
VariableName = Annotated[
    str,
    Field(min_length=1, max_length=256),
    matching("^[-._a-zA-Z][-._a-zA-Z0-9]*$", "must be a variable's name: letters, digits, _, - and ., not beginning with a digit"),
]
PoolName = Annotated[
    str,
    Field(min_length=1, max_length=NAME_MAX_LENGTH),
    matching(NAME_PATTERN, "must be the name of a KVCachePool: a-z, 0-9 and '-', starting with a letter"),
]
