"""The connector's configuration: parsed once at the edge, every error names the key, the value and what is allowed.

Comes from `kv_connector_extra_config`; a JSON file with the same schema may be named by `config_file` or the environment
variable `EPOCHKV_CONFIG` (inline keys win), so that an engine a trainer starts can join with a file alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

CONFIG_ENV = "EPOCHKV_CONFIG"


class ConfigError(ValueError):
    """The configuration cannot be used; the message names key, value and remedy."""


class PoolRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The pool this engine belongs to. `uid` is never reused, also when a pool of the same name is made again."""

    name: str
    namespace: str
    uid: str


class HubRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the hub listens, and the directory with `hub.pub`, `client.pub`, `client.key`, `root.secret`."""

    endpoint: str
    credentials_dir: str


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
        path = inline.pop("config_file", None) or (os.environ if environ is None else environ).get(CONFIG_ENV)
        merged: dict[str, Any] = {}
        if path:
            try:
                merged = msgspec.json.decode(Path(path).read_bytes(), type=dict[str, Any])
            except (OSError, msgspec.DecodeError) as error:
                raise ConfigError(f"config_file {path!r} cannot be read as JSON: {error}") from error
        merged.update(inline)
        try:
            config = msgspec.convert(merged, cls)
        except msgspec.ValidationError as error:
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
        if not self.pool.uid:
            raise ConfigError("pool.uid is empty; give the pool's uid")
