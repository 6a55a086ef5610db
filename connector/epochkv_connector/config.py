"""The connector's configuration: parsed once at the edge, every error names the key, the value and what is allowed.

Comes from `kv_connector_extra_config`; a JSON file with the same schema may be named by `config_file` or the environment
variable `EPOCHKV_CONFIG`, which may also hold the JSON itself (inline keys win), so that an engine a trainer starts can join
with a file, or its environment, alone. Pool and hub are those of every client (`epochkv_fence.connection`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from epochkv_connector import schema
from epochkv_fence.connection import CONFIG_ENV, ConfigurationError, HubRef, PoolRef, check_pool, read_document

__all__ = ["CONFIG_ENV", "ConfigError", "ConnectorConfig", "DistributedTier", "HubRef", "LocalTier", "PoolRef"]

EXTRA: Final = "kv_connector_extra_config"
MAX_BYTES: Final = 1 << 50
MAX_COUNT: Final = 1 << 31


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
        document, origin = _document(inline.pop("config_file", None), variables)
        merged = {**document, **inline}
        found = schema.problem(merged, SCHEMA)
        if found is not None:
            key, sentence = found
            raise ConfigError(f"{EXTRA if key in inline or key not in document else origin}: {sentence}")
        try:
            config = msgspec.convert(merged, cls)
        except (msgspec.MsgspecError, RecursionError, ValueError, TypeError, OverflowError) as error:
            raise ConfigError(f"{EXTRA}: {error}; known keys: {', '.join(cls.__struct_fields__)}") from error
        config.check()
        return config

    def check(self) -> None:
        """Raise `ConfigError` for values that exclude each other, and for a pool that cannot be one."""
        if self.tracker and self.distributed:
            raise ConfigError(
                f"{EXTRA}: tracker is true and distributed is set; it must be false with an L2, where another engine may have saved"
            )
        try:
            check_pool(self.pool, EXTRA)
        except ConfigurationError as error:
            raise ConfigError(str(error)) from None


def _document(source: object, variables: Mapping[str, str]) -> tuple[dict[str, Any], str]:
    """What the file or the environment gives, and its name in errors."""
    if source is not None and not (isinstance(source, str) and source.strip()):
        raise ConfigError(f"{EXTRA}: config_file is {schema.shown(source)}; it must be the path of a JSON file; or leave it out")
    named = f"{EXTRA}: config_file" if source is not None else CONFIG_ENV
    given = source if source is not None else variables.get(CONFIG_ENV, "").strip() or None
    if given is None:
        return {}, EXTRA
    assert isinstance(given, str)
    try:
        document = read_document(given, variables)
    except ConfigurationError as error:
        words = str(error).removeprefix("the connection configuration").removeprefix(CONFIG_ENV).lstrip(": ")
        raise ConfigError(f"{named}: {schema.shown(given) + ' ' if words.startswith('is ') else ''}{words}") from None
    return document.content, named if given.lstrip().startswith("{") else document.origin


def _is_master(address: str) -> bool:
    scheme, _, endpoints = address.rpartition("://")
    return scheme in ("", "etcd") and all(schema.is_host_port(part) for part in endpoints.split(";"))


def _is_word(value: str) -> bool:
    return value != "" and value.isprintable() and not any(map(str.isspace, value))


SCHEMA: Final = schema.Table(
    {
        "pool": schema.Table(
            {
                "name": schema.text("the pool's name", lambda value: True, optional=False),
                "uid": schema.text("the pool's uid", lambda value: True, optional=False),
                "namespace": schema.text("the pool's namespace", lambda value: True),
            },
            "every pool's connection.json has it",
            optional=False,
        ),
        "hub": schema.Table(
            {
                "endpoint": schema.text("an address like tcp://host:7700", lambda value: True, optional=False),
                "credentials_dir": schema.Rule(
                    "the directory with hub.pub, client.pub, client.key and root.secret",
                    lambda value: value is None or isinstance(value, str),
                    "leave it out to take them from the environment",
                ),
            },
            "leave hub out for an engine that shares nothing",
        ),
        "weights_source": schema.choice("Pushed", "Model"),
        "local": schema.Table(
            {"capacity_bytes": schema.whole(1, MAX_BYTES, "bytes", "or leave local out for no L1", optional=False)},
            "leave local out for no L1",
        ),
        "distributed": schema.Table(
            {
                "master_address": schema.text(
                    "host:port of the Mooncake master, or etcd://host:port;host:port of a replicated one",
                    _is_master,
                    remedy="or leave distributed out for no L2",
                    optional=False,
                ),
                "metadata_server": schema.text("P2PHANDSHAKE or the address of Mooncake's metadata server", _is_word),
                "protocol": schema.choice("tcp", "rdma"),
                "device_name": schema.text("names of RDMA devices with commas, or empty", str.isprintable),
            },
            "leave distributed out for no L2",
        ),
        "tracker": schema.flag(),
        "on_local_reset": schema.choice("private", "propose"),
        "lookup_wait_ms": schema.number(0, 60_000, "milliseconds"),
        "lookup_deadline_ms": schema.number(0, 600_000, "milliseconds", above=True),
        "min_load_tokens": schema.whole(0, MAX_COUNT, "tokens"),
        "job_deadline_seconds": schema.number(0, 3600, "seconds", above=True),
        "verify": schema.choice("full", "header"),
        "tracker_capacity": schema.whole(1, MAX_COUNT, "blocks"),
        "staging_slots": schema.whole(1, 1 << 20, "blocks"),
        "allow_untested_vllm": schema.flag(),
        "encoder": schema.choice("Frozen", "Pushed"),
    }
)
"""What every key may hold; its keys are those of `ConnectorConfig` and of the structures in it."""
