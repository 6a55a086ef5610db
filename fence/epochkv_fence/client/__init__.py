"""The trainer's client: prove that a push arrived, reset a pool's KV, see its engines. Needs the pool's key, not Kubernetes."""

from epochkv_fence.client.arguments import ArgumentError
from epochkv_fence.client.async_pool import AsyncPool
from epochkv_fence.client.errors import (
    HubUnreachable,
    KeyRefused,
    PoolClosed,
    PoolError,
    ResetNotRecorded,
    ResetTimeout,
    WeightsDiverged,
    WrongPool,
)
from epochkv_fence.client.pool import Pool
from epochkv_fence.client.progress import Standing
from epochkv_fence.client.results import Engine, PoolStatus, Reset
from epochkv_fence.client.waiting import Update
from epochkv_fence.client.weights import UnknownWeights, WeightsGroup, WeightsReport, WeightsStanding
from epochkv_fence.connection import ConfigurationError, Connection

__all__ = [
    "ArgumentError",
    "AsyncPool",
    "ConfigurationError",
    "Connection",
    "Engine",
    "HubUnreachable",
    "KeyRefused",
    "Pool",
    "PoolClosed",
    "PoolError",
    "PoolStatus",
    "Reset",
    "ResetNotRecorded",
    "ResetTimeout",
    "Standing",
    "UnknownWeights",
    "Update",
    "WeightsDiverged",
    "WeightsGroup",
    "WeightsReport",
    "WeightsStanding",
    "WrongPool",
]
