"""The trainer's client: prove that a push arrived, reset a pool's KV, see its engines. Needs the pool's key, not Kubernetes."""

from epochkv_fence.client.arguments import ArgumentError
from epochkv_fence.client.pool import AsyncPool, Pool
from epochkv_fence.client.pushes import Update
from epochkv_fence.client.resets import Standing
from epochkv_fence.client.results import (
    Engine,
    HubUnreachable,
    KeyRefused,
    PoolClosed,
    PoolError,
    PoolStatus,
    Reset,
    ResetNotRecorded,
    ResetTimeout,
    UnknownWeights,
    WeightsDiverged,
    WeightsGroup,
    WeightsReport,
    WeightsStanding,
    WrongPool,
)
from epochkv_fence.client.stamps import Made, Stamp, stamps
from epochkv_fence.client.warm import Warmed, WarmFailed, warm
from epochkv_fence.connection import ConfigurationError, Connection

__all__ = [
    "ArgumentError",
    "AsyncPool",
    "ConfigurationError",
    "Connection",
    "Engine",
    "HubUnreachable",
    "KeyRefused",
    "Made",
    "Pool",
    "PoolClosed",
    "PoolError",
    "PoolStatus",
    "Reset",
    "ResetNotRecorded",
    "ResetTimeout",
    "Stamp",
    "Standing",
    "UnknownWeights",
    "Update",
    "WarmFailed",
    "Warmed",
    "WeightsDiverged",
    "WeightsGroup",
    "WeightsReport",
    "WeightsStanding",
    "WrongPool",
    "stamps",
    "warm",
]
