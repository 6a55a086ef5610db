"""How long an engine may take to start. A bound that is too short never lets a big model start; one that is too long costs little.

An engine whose start fails ends by itself, and one that hangs shows in the condition `Progressing`. So the bound is generous: the time
to read as many bytes as the pod could hold as weights, from a slow volume, and some minutes for compiling and capturing graphs.
"""

from __future__ import annotations

from typing import Final

from epochkv_fence import quantity
from epochkv_operator.api.engine import InferenceEngineSpec
from epochkv_operator.planning.context import Json

PERIOD_SECONDS: Final = 5
_BASE_SECONDS = 600
_BYTES_PER_SECOND = 256 * 2**20  # a network volume that is shared, or a download
_ACCELERATOR_BYTES = 192 * 2**30  # nobody says how much memory one has; few have more
_UNKNOWN_BYTES = 64 * 2**30
_PULL_SECONDS = 900  # to be scheduled, and to pull an image with vLLM in it
_PLAIN_RESOURCES = ("cpu", "memory", "ephemeral-storage")


def startup_failures(spec: InferenceEngineSpec) -> int:
    """`failureThreshold` of the startup probe."""
    return -(-(_BASE_SECONDS + _weights_bytes(spec) // _BYTES_PER_SECOND) // PERIOD_SECONDS)


def progress_deadline(pod: Json) -> int:
    """Seconds after which a rollout without progress counts as stuck: a pod may take as long as its startup probe, overridden or not,
    allows.
    """
    container = next(container for container in pod["containers"] if container["name"] == "engine")
    probe = container.get("startupProbe") or {}
    seconds = _number(probe, "initialDelaySeconds", 0) + _number(probe, "periodSeconds", 10) * _number(probe, "failureThreshold", 3)
    return min(_PULL_SECONDS + seconds, 2**31 - 1)


def _weights_bytes(spec: InferenceEngineSpec) -> int:
    """The most that the weights in one pod can take: the memory of its accelerators, or else its own."""
    given = spec.resources
    sections = [section for section in (given.limits, given.requests) if section] if given is not None else []
    amounts = {name: amount for section in reversed(sections) for name, amount in section.items()}  # limits win
    devices = sum(
        quantity.to_bytes(amount) for name, amount in amounts.items() if name not in _PLAIN_RESOURCES and not name.startswith("hugepages-")
    )
    if devices:
        return min(devices, spec.parallelism.ranks_per_pod) * _ACCELERATOR_BYTES
    return quantity.to_bytes(amounts["memory"]) if "memory" in amounts else _UNKNOWN_BYTES


def _number(probe: Json, key: str, default: int) -> int:
    """A number of a probe that a user may have overridden with anything; the API server rejects the rest."""
    value = probe.get(key, default)
    return value if isinstance(value, int) and value > 0 else default
