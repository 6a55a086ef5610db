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

from epochkv_connector.config import schema
from epochkv_fence.connection import (
    CONFIG_ENV,
    ConfigurationError,
    HubRef,
    PoolRef,
    check_endpoint,
    check_pool,
    read_document,
    refuse_gone,
)

__all__ = ["CONFIG_ENV", "ConfigError", "ConnectorConfig", "DistributedTier", "HubRef", "LocalTier", "PoolRef"]

NAME: Final = "EpochKVConnector"
"""What `kv_connector` is in vLLM's configuration."""
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
    """Everything the connector can be told. Absent tiers are off; without `hub` this engine is a pool of its own."""

    pool: PoolRef
    hub: HubRef | None = None
    local: LocalTier | None = None
    distributed: DistributedTier | None = None
    tracker: bool = False
    lookup_wait_ms: float = 1.0
    lookup_deadline_ms: float = 500.0
    min_load_tokens: int = 0
    job_deadline_seconds: float = 10.0
    verify: Literal["full", "header"] = "full"
    tracker_capacity: int = 100_000
    staging_slots: int = 64
    allow_untested_vllm: bool = False

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
        try:
            refuse_gone(inline, EXTRA)
            refuse_gone(document, origin)
        except ConfigurationError as error:
            raise ConfigError(str(error)) from None
        found = schema.problem(merged, SCHEMA)
        if found is not None:
            key, sentence = found
            raise ConfigError(f"{EXTRA if key in inline or key not in document else origin}: {sentence}")
        try:
            config = msgspec.convert(merged, cls)
        except (msgspec.MsgspecError, RecursionError, ValueError, TypeError, OverflowError) as error:
            raise ConfigError(f"{EXTRA}: {error}; known keys: {', '.join(SCHEMA.keys)}") from error
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
    rule = SCHEMA.keys["config_file"]
    assert isinstance(rule, schema.Rule)
    if source is not None and not rule.fits(source):
        raise ConfigError(f"{EXTRA}: config_file is {schema.shown(source)}; it must be {rule.allowed}; {rule.remedy}")
    named = f"{EXTRA}: config_file" if source is not None else CONFIG_ENV
    given = source if source is not None else variables.get(CONFIG_ENV, "").removeprefix("\ufeff").strip() or None
    if given is None:
        return {}, EXTRA
    assert isinstance(given, str)
    try:
        document = read_document(given, variables)
    except ConfigurationError as error:
        words = str(error).removeprefix("the connection configuration").removeprefix(CONFIG_ENV).lstrip(": ")
        raise ConfigError(f"{named}: {schema.shown(given) + ' ' if words.startswith('is ') else ''}{words}") from None
    origin = named if given.lstrip().startswith("{") else document.origin
    if "config_file" in document.content:
        value = schema.shown(document.content["config_file"])
        raise ConfigError(f"{origin}: config_file is {value}; it must be in {EXTRA}, as a file cannot name another; leave it out")
    return document.content, origin


def _is_master(address: str) -> bool:
    scheme, _, endpoints = address.rpartition("://")
    return scheme in ("", "etcd") and all(schema.is_host_port(part) for part in endpoints.split(";"))


def _is_endpoint(address: str) -> bool:
    try:
        check_endpoint(address, "hub.endpoint")
    except ConfigurationError:
        return False
    return True


def _is_word(value: str) -> bool:
    return value != "" and value.isprintable() and not any(map(str.isspace, value))


SCHEMA: Final = schema.Table(
    {
        "config_file": schema.text(
            "the path of a JSON file",
            lambda value: value.strip() != "",
            remedy="or leave it out",
            does="A JSON file with the keys of this page, or the folder of a `connection.json`. Keys that are given beside it win. "
            "Without it the environment variable `EPOCHKV_CONFIG` names the file, or holds the JSON itself.",
        ),
        "pool": schema.Table(
            {
                "name": schema.text("the pool's name", lambda value: True, optional=False, does="The pool's name, for people."),
                "uid": schema.text(
                    "the pool's uid",
                    lambda value: True,
                    optional=False,
                    does="What the names of its blocks are made with. Never used again, also when a pool of the same name is made.",
                ),
                "namespace": schema.text("the pool's namespace", lambda value: True, does="Its Kubernetes namespace, if it has one."),
            },
            "every pool's connection.json has it",
            optional=False,
            does="The pool that this engine is in. `connection.json` of `epochkv hub` (`STATE/client`) and of the operator has it.",
        ),
        "hub": schema.Table(
            {
                "endpoint": schema.text(
                    "an address like tcp://host:7700", _is_endpoint, optional=False, does="Where the hub can be dialled from this engine."
                ),
                "credentials_dir": schema.Rule(
                    "the directory with hub.pub, client.pub, client.key and root.secret",
                    lambda value: value is None or isinstance(value, str),
                    "leave it out to take them from the environment",
                    does="Its keys; in a file, relative to that file. An engine that cannot read them at its start serves in bypass. "
                    "Without it they come from `EPOCHKV_HUB_PUBLIC_KEY`, `EPOCHKV_CLIENT_PUBLIC_KEY`, `EPOCHKV_CLIENT_SECRET_KEY` and "
                    "`EPOCHKV_ROOT_SECRET`.",
                ),
            },
            "leave hub out for an engine that shares nothing",
            does="The way to the fence. Without it nothing is shared: this engine is a pool of its own.",
        ),
        "local": schema.Table(
            {
                "capacity_bytes": schema.whole(
                    1,
                    MAX_BYTES,
                    "bytes",
                    "or leave local out for no L1",
                    optional=False,
                    does="Of one engine, split evenly over its worker ranks. It must hold one block on each of them, and fit into the "
                    "memory of this machine or container.",
                )
            },
            "leave local out for no L1",
            does="L1: host memory of this engine. Without it there is none.",
        ),
        "distributed": schema.Table(
            {
                "master_address": schema.text(
                    "host:port of the Mooncake master, or etcd://host:port;host:port of a replicated one",
                    _is_master,
                    remedy="or leave distributed out for no L2",
                    optional=False,
                    does="The Mooncake master. One that does not answer is no error: the engine goes on without L2 until it does.",
                ),
                "metadata_server": schema.text(
                    "P2PHANDSHAKE or the address of Mooncake's metadata server",
                    _is_word,
                    does="How Mooncake's clients find each other; the same on stores and engines. `P2PHANDSHAKE` needs no server.",
                ),
                "protocol": schema.choice("tcp", "rdma", does="How blocks travel; as the stores have it."),
                "device_name": schema.text(
                    "names of RDMA devices with commas, or empty", str.isprintable, does="RDMA devices of this machine, for `rdma`."
                ),
            },
            "leave distributed out for no L2",
            does="L2: a Mooncake store that all engines of the pool share. Without it there is none.",
        ),
        "tracker": schema.flag(
            does="For pools without an L2: a block counts as absent, without a search, unless every rank has confirmed that it saved it. "
            "Refused with an L2, where another engine may have saved it."
        ),
        "lookup_wait_ms": schema.number(
            0, 60_000, "milliseconds", does="How long one scheduler step waits for answers of L2, all its requests together."
        ),
        "lookup_deadline_ms": schema.number(
            0, 600_000, "milliseconds", above=True, does="How long L2 may take to answer for one request; then what L1 holds counts."
        ),
        "min_load_tokens": schema.whole(
            0, MAX_COUNT, "tokens", does="A hit that saves fewer tokens than this, beyond what the GPU still has, is computed instead."
        ),
        "job_deadline_seconds": schema.number(
            0, 3600, "seconds", above=True, does="How long a load or a save may take; then it has failed, and what it was for is computed."
        ),
        "verify": schema.choice(
            "full",
            "header",
            does="What is checked of a block in L2: header, trailer and a checksum of all its bytes, or the first two alone.",
        ),
        "tracker_capacity": schema.whole(1, MAX_COUNT, "blocks", does="How many blocks `tracker` remembers."),
        "staging_slots": schema.whole(
            1,
            1 << 20,
            "blocks",
            does="Without an L1: host buffers on each rank, through which blocks travel to L2 and back; each is as large as a block. "
            "With an L1 its own memory serves for that, and this key for nothing.",
        ),
        "allow_untested_vllm": schema.flag(does="Start with a vLLM whose version was not tested, at your own risk."),
    }
)
"""What every key may hold; its keys are `config_file` and those of `ConnectorConfig` and of the structures in it."""
