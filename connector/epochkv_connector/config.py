"""The connector's configuration: parsed once at the edge, every error names the key, the value and what is allowed.

Comes from `kv_connector_extra_config`; a JSON file with the same schema may be named by `config_file` or the environment
variable `EPOCHKV_CONFIG`, which may also hold the JSON itself (inline keys win), so that an engine a trainer starts can join
with a file, or its environment, alone. Pool and hub are those of every client (`epochkv_fence.connection`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from epochkv_fence.connection import CONFIG_ENV, ConnectionError_, HubRef, PoolRef, check_pool, read_document

__all__ = ["CONFIG_ENV", "ConfigError", "ConnectorConfig", "DistributedTier", "HubRef", "LocalTier", "PoolRef"]


class ConfigError(ValueError):
    """The configuration cannot be used; the message names key, value and remedy."""


class LocalTier(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """L1. `capacity_bytes` is per engine, split evenly over its worker ranks."""

    capacity_bytes: int


class DistributedTier(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """L2: a Mooncake store."""

    master_address: str
    metadata_server: str = "P2PHANDSHAKE"
    protocol: Literal["tcp", "rdma"] = "tcp"
    device_name: str = ""


class ConnectorConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything the connector can be told. Absent tiers are off; without `hub` the root stays private."""

    pool: PoolRef
    hub: HubRef | None = None
    weights_source: Literal["Pushed", "Model"] = "Pushed"
    local: LocalTier | None = None
    distributed: DistributedTier | None = None
    tracker: bool = False
    on_local_reset: Literal["private", "propose"] = "private"
    lookup_wait_ms: float = 1.0
    lookup_deadline_ms: float = 500.0
    min_load_tokens: int = 0
    job_deadline_seconds: float = 10.0
    verify: Literal["full", "header"] = "full"
    tracker_capacity: int = 100_000
    staging_slots: int = 64
    allow_untested_vllm: bool = False
    encoder: Literal["Frozen", "Pushed"] = "Pushed"

    @classmethod
    def parse(cls, extra: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> ConnectorConfig:
        """Build from `kv_connector_extra_config`.

        Raises:
            ConfigError: unknown key, wrong type, impossible value or unreadable file.
        """
        inline = dict(extra)
        variables = os.environ if environ is None else environ
        source = inline.pop("config_file", None) or variables.get(CONFIG_ENV, "").strip() or None
        merged: dict[str, Any] = {}
        if source is not None:
            try:
                merged = read_document(source, variables).content
            except ConnectionError_ as error:
                raise ConfigError(f"config_file or {CONFIG_ENV}: {error}") from error
        merged = {**merged, **inline}
        try:
            config = msgspec.convert(merged, cls)
        except (msgspec.MsgspecError, RecursionError, ValueError, TypeError, OverflowError) as error:
            raise ConfigError(f"kv_connector_extra_config: {error}; known keys: {', '.join(cls.__struct_fields__)}") from error
        config.check()
        return config

    def check(self) -> None:
        """Raise `ConfigError` for values that the types cannot exclude."""
        positive = ("lookup_deadline_ms", "job_deadline_seconds", "tracker_capacity", "staging_slots")
        for key in positive:
            if getattr(self, key) <= 0:
                raise ConfigError(f"{key} is {getattr(self, key)}; it must be greater than 0")
        for key in ("lookup_wait_ms", "min_load_tokens"):
            if getattr(self, key) < 0:
                raise ConfigError(f"{key} is {getattr(self, key)}; it must be 0 or more")
        if self.local and self.local.capacity_bytes <= 0:
            raise ConfigError(f"local.capacity_bytes is {self.local.capacity_bytes}; give bytes, or leave local out for no L1")
        if self.distributed and ":" not in self.distributed.master_address:
            raise ConfigError(f"distributed.master_address is {self.distributed.master_address!r}; it must be host:port")
        if self.tracker and self.distributed:
            raise ConfigError("tracker is true and distributed is set; with an L2 another engine may have saved, so set tracker to false")
        try:
            check_pool(self.pool, "kv_connector_extra_config")
        except ConnectionError_ as error:
            raise ConfigError(str(error)) from error
