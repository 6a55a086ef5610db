"""The connector's configuration: parsed once at the edge, every error names the key, the value and what is allowed.

The keys come from `kv_connector_extra_config`. `config_file` or the environment variable `EPOCHKV_CONFIG` may name a JSON file
with the same keys, and the variable may hold the JSON itself; inline keys win. So an engine that a trainer starts can join
with a file, or its environment, alone. Clients use the same `pool` and `hub` (`epochkv_fence.connection`). Each key is
declared once, at its field, in the terms of `schema`; the reference page is generated from that.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from epochkv_connector.config import schema
from epochkv_fence.connection import (
    CONFIG_ENV,
    ConfigurationError,
    HubRef,
    PoolRef,
    check_pool,
    read_document,
    refuse_gone,
)

NAME: Final = "EpochKVConnector"
"""What `kv_connector` is in vLLM's configuration."""
EXTRA: Final = "kv_connector_extra_config"
MAX_BYTES: Final = 1 << 50
MAX_COUNT: Final = 1 << 31


class ConfigError(ValueError):
    """The configuration cannot be used; the message names key, value and remedy."""


def _is_master(address: str) -> bool:
    scheme, _, endpoints = address.rpartition("://")
    return scheme in ("", "etcd") and all(schema.is_host_port(part) for part in endpoints.split(";"))


def _is_word(value: str) -> bool:
    return value != "" and value.isprintable() and not any(map(str.isspace, value))


class LocalTier(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """L1."""

    capacity_bytes: Annotated[
        int,
        Meta(
            ge=1,
            le=MAX_BYTES,
            description="Size of L1 of one engine, split evenly over its worker ranks; no rank takes more than its share. The rank whose "
            "blocks are largest decides how many blocks L1 holds. It must hold one block on each rank, and fit into the memory of this "
            "machine or container.",
            extra={"unit": "bytes", "remedy": "or leave local out for no L1"},
        ),
    ]


class DistributedTier(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """L2: a Mooncake store."""

    master_address: Annotated[
        str,
        Meta(
            description="The Mooncake master. While it does not answer, the engine serves without L2.",
            extra={
                "allowed": "host:port of the Mooncake master, or etcd://host:port;host:port of a replicated one",
                "fits": _is_master,
                "remedy": "or leave distributed out for no L2",
            },
        ),
    ]
    metadata_server: Annotated[
        str,
        Meta(
            description="How Mooncake's clients find each other. Stores and engines need the same value. `P2PHANDSHAKE` needs no server.",
            extra={"allowed": "P2PHANDSHAKE or the address of Mooncake's metadata server", "fits": _is_word},
        ),
    ] = "P2PHANDSHAKE"
    protocol: Annotated[Literal["tcp", "rdma"], Meta(description="How blocks travel. It must be the protocol of the stores.")] = "tcp"
    device_name: Annotated[
        str,
        Meta(
            description="RDMA devices of this machine, for `rdma`.",
            extra={"allowed": "names of RDMA devices with commas, or empty", "fits": str.isprintable},
        ),
    ] = ""


class ConnectorConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything the connector can be told. Absent tiers are off; without `hub` this engine is a pool of its own."""

    config_file: Annotated[
        str | None,
        Meta(
            description="A JSON file with the keys of this page, or the folder of a `connection.json`. Keys beside `config_file` win. "
            "Without it, the environment variable `EPOCHKV_CONFIG` names the file or holds the JSON itself.",
            extra={"allowed": "the path of a JSON file", "fits": lambda value: value.strip() != "", "remedy": "or leave it out"},
        ),
    ] = None
    pool: Annotated[
        PoolRef,
        Meta(
            description="The pool of this engine. Every pool's `connection.json` has it.",
            extra={"remedy": "every pool's connection.json has it"},
        ),
    ]
    hub: Annotated[
        HubRef | None,
        Meta(
            description="The pool's hub. Without it, this engine shares nothing.",
            extra={"remedy": "leave hub out for an engine that shares nothing"},
        ),
    ] = None
    local: Annotated[
        LocalTier | None,
        Meta(
            description="L1: host memory of this engine. Without it, the engine has no L1.", extra={"remedy": "leave local out for no L1"}
        ),
    ] = None
    distributed: Annotated[
        DistributedTier | None,
        Meta(
            description="L2: a Mooncake store that all engines of the pool share. Without it, the engine has no L2.",
            extra={"remedy": "leave distributed out for no L2"},
        ),
    ] = None
    tracker: Annotated[
        bool,
        Meta(
            description="For pools without an L2: a block counts as absent, without a search, unless every rank has confirmed its save. "
            "Rejected with an L2, where another engine may have saved the block."
        ),
    ] = False
    lookup_wait_ms: Annotated[
        float,
        Meta(
            ge=0,
            le=60_000,
            description="How long one scheduler step waits for answers of L2, for all its requests together.",
            extra={"unit": "milliseconds"},
        ),
    ] = 1.0
    lookup_deadline_ms: Annotated[
        float,
        Meta(
            gt=0,
            le=600_000,
            description="How long L2 may take to answer for one request. After that, only the L1 answer counts.",
            extra={"unit": "milliseconds"},
        ),
    ] = 500.0
    min_load_tokens: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_COUNT,
            description="Ignore hits that add fewer tokens than this to the GPU hit.",
            extra={"unit": "tokens"},
        ),
    ] = 0
    job_deadline_seconds: Annotated[
        float,
        Meta(
            gt=0,
            le=3600,
            description="How long a load or a save may take. After that it has failed, and the engine computes.",
            extra={"unit": "seconds"},
        ),
    ] = 10.0
    verify: Annotated[
        Literal["full", "header"],
        Meta(description="What a load from L2 checks: header, trailer and a checksum of all bytes (`full`), or only header and trailer."),
    ] = "full"
    tracker_capacity: Annotated[
        int, Meta(ge=1, le=MAX_COUNT, description="How many blocks `tracker` remembers.", extra={"unit": "blocks"})
    ] = 100_000
    staging_slots: Annotated[
        int,
        Meta(
            ge=1,
            le=1 << 20,
            description="Host buffers on each rank, through which blocks travel to L2 and back; each is as large as a block. Only for "
            "engines without an L1: with an L1, its memory serves for that.",
            extra={"unit": "blocks"},
        ),
    ] = 64
    allow_untested_vllm: Annotated[bool, Meta(description="Start with a version of vLLM that was not tested, at your own risk.")] = False

    @property
    def has_tiers(self) -> bool:
        """It names L1 or L2."""
        return self.local is not None or self.distributed is not None

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
        found = schema.problem(merged, KEYS)
        if found is not None:
            key, sentence = found
            raise ConfigError(f"{EXTRA if key in inline or key not in document else origin}: {sentence}")
        config = msgspec.convert(merged, cls)
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
    wrong = schema.problem({"config_file": source}, {"config_file": KEYS["config_file"]})
    if wrong is not None:
        raise ConfigError(f"{EXTRA}: {wrong[1]}")
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


KEYS: Final = schema.keys_of(ConnectorConfig)
