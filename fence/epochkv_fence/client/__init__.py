"""The trainer's client: reset a pool's KV, push weights safely, see its engines. Needs the pool's key, not Kubernetes."""

from epochkv_fence.client.arguments import ArgumentError
from epochkv_fence.client.async_pool import AsyncPool
from epochkv_fence.client.calls import Standing
from epochkv_fence.client.errors import (
    HubUnreachable,
    KeyRefused,
    PoolClosed,
    PoolError,
    ResetNotRecorded,
    ResetTimeout,
    UpdateInProgress,
    WrongPool,
)
from epochkv_fence.client.pool import Pool
from epochkv_fence.client.results import Engine, OpenUpdate, PoolStatus, Reset
from epochkv_fence.client.updating import Update
from epochkv_fence.connection import ConfigurationError, Connection

__all__ = [
    "ArgumentError",
    "AsyncPool",
    "ConfigurationError",
    "Connection",
    "Engine",
    "HubUnreachable",
    "KeyRefused",
    "OpenUpdate",
    "Pool",
    "PoolClosed",
    "PoolError",
    "PoolStatus",
    "Reset",
    "ResetNotRecorded",
    "ResetTimeout",
    "Standing",
    "Update",
    "UpdateInProgress",
    "WrongPool",
]
