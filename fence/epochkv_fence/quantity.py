"""Sizes as Kubernetes writes them (`64Gi`, `500m`, `1e9`), read exactly as the API server reads them.

The planner does arithmetic on sizes (pod memory = what the user asked for + L1), so a string check is not enough. Engines take
sizes of the same form from their environment.
Source: k8s.io/apimachinery/pkg/api/resource/quantity.go.
"""

import re
from contextlib import suppress
from decimal import ROUND_CEILING, Decimal

_PATTERN = re.compile(r"^(?P<number>[+-]?(?:\d+\.?\d*|\.\d+))(?P<suffix>[KMGTPE]i|[numkMGTPE]|[eE][+-]?\d+|)$", re.ASCII)
_FACTORS = {
    "": Decimal(1),
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    **{unit: Decimal(1000) ** power for power, unit in enumerate("kMGTPE", start=1)},
    **{f"{unit}i": Decimal(1024) ** power for power, unit in enumerate("KMGTPE", start=1)},
}
_BINARY = (("Gi", 2**30), ("Mi", 2**20), ("Ki", 2**10))


def parse(value: int | str) -> Decimal:
    """The number that a quantity stands for. Raises `ValueError`: not a quantity; the text says what one looks like."""
    if isinstance(value, int):
        return Decimal(value)
    if (match := _PATTERN.match(value)) is not None:
        suffix = match["suffix"]
        with suppress(ArithmeticError):  # beyond all that a Decimal holds, such as 1e9999999
            return Decimal(match["number"]) * (_FACTORS[suffix] if suffix in _FACTORS else Decimal(f"1e{suffix[1:]}"))
    raise ValueError(f"{value!r} must be a Kubernetes quantity such as 64Gi, 500M or 2")


def to_bytes(value: int | str) -> int:
    """Whole bytes, rounded up as the API server does."""
    return int(parse(value).to_integral_value(ROUND_CEILING))


def from_bytes(num_bytes: int) -> str:
    """The shortest exact binary quantity, in the form the API server itself would print."""
    for suffix, factor in _BINARY:
        if num_bytes and num_bytes % factor == 0:
            return f"{num_bytes // factor}{suffix}"
    return str(num_bytes)
