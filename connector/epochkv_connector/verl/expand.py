"""From the block to vLLM's `kv_transfer_config`, and to what has to answer before engines are started. Reads one file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from epochkv_connector.config import schema
from epochkv_connector.config.connector_config import EXTRA, NAME, ConfigError, ConnectorConfig
from epochkv_connector.config.transfer import MOONCAKE, MOONCAKE_ENV, MOONCAKE_KEY, transfer_config
from epochkv_connector.verl.block import WHERE, BlockError, KvStore
from epochkv_fence.connection import CONFIG_ENV, ConfigurationError, Connection, read_document

MASTER: Final = "master_server_address"


@dataclass(frozen=True, slots=True)
class Expansion:
    """What engines get, and what they will need.

    Attributes:
        transfer: `kv_transfer_config`.
        connection: the way to the pool's hub; None: the connector has none.
        master: address of the Mooncake master; None: there is no L2.
        source: what names the pool, for errors.
        has_tiers: it names L1 or L2.
    """

    transfer: dict[str, Any]
    connection: Connection | None
    master: str | None
    source: str = "config_path"
    has_tiers: bool = True


def expand(block: KvStore, environ: Mapping[str, str]) -> Expansion:
    """What an enabled block stands for.

    Raises:
        BlockError: the file is missing, cannot be read, or is not one of that connector.
    """
    mooncake = environ.get(MOONCAKE_ENV, "").strip()
    pool = environ.get(CONFIG_ENV, "").strip()
    source = block.config_path or {NAME: pool, MOONCAKE: mooncake}.get(block.kv_connector or "", pool or mooncake)
    if not source:
        variable = {NAME: CONFIG_ENV, MOONCAKE: MOONCAKE_ENV}.get(block.kv_connector or "", f"{CONFIG_ENV} or {MOONCAKE_ENV}")
        raise BlockError(f"{WHERE}: config_path is missing; it must be the path of a JSON file, or set {variable}")
    named = "config_path" if block.config_path else CONFIG_ENV if block.kv_connector != MOONCAKE and pool else MOONCAKE_ENV
    try:
        content = read_document(source, environ, named).content
    except ConfigurationError as error:
        text = str(error) if named in str(error) else f"{named}: {error}"
        raise BlockError(f"{WHERE}: {text}") from None
    kind = NAME if "pool" in content else MOONCAKE if MASTER in content else ""
    if not kind:
        raise BlockError(
            f"{WHERE}: {named} is {schema.shown(source)}, which has neither the key pool (a connection.json of EpochKV) nor {MASTER} "
            "(a file of Mooncake's clients); give one of them"
        )
    if block.kv_connector not in (None, kind):
        raise BlockError(
            f"{WHERE}: kv_connector is '{block.kv_connector}', but {named} is {schema.shown(source)}, a file for {kind}; "
            f"set kv_connector to {kind}, or give another file"
        )
    if block.extra_config is not None and "config_file" in block.extra_config:
        raise BlockError(f"{WHERE}: extra_config has config_file, which the checks of {named} would not see; give the file as config_path")
    make = _ours if kind == NAME else _mooncake
    return replace(make(block, source, content, environ), source=named)


def _ours(block: KvStore, source: str, content: Mapping[str, Any], environ: Mapping[str, str]) -> Expansion:
    is_text = source.lstrip().startswith("{")  # in the driver's environment, which engines need not have
    extra = {**(content if is_text else {"config_file": _absolute(source)}), **(block.extra_config or {})}
    try:
        config = ConnectorConfig.parse(extra, environ)
        if config.hub is None:
            raise BlockError(f"{WHERE}: {schema.shown(source)} has no key hub; give the connection.json of a pool")
        document = {"pool": content["pool"], "hub": content.get("hub", {})}
        connection = Connection.load({**document, **{key: extra[key] for key in document if key in extra}}, environ, "config_path")
        connection.client_keys()
    except (ConfigError, ConfigurationError) as error:
        text = str(error).replace(f"{EXTRA}: config_file", "config_path").replace(EXTRA, "extra_config")
        raise BlockError(f"{WHERE}: {text}") from None
    master = config.distributed.master_address if config.distributed is not None else None
    return Expansion(transfer_config(extra, block.kv_role), connection, master, has_tiers=config.has_tiers)


def _mooncake(block: KvStore, source: str, content: Mapping[str, Any], environ: Mapping[str, str]) -> Expansion:
    """vLLM's own connector. Our plugin hands the path on to it: it reads a variable only."""
    master = content[MASTER]
    if not (isinstance(master, str) and master):
        raise BlockError(
            f"{WHERE}: {schema.shown(source)}: {MASTER} is {schema.shown(master)}; it must be host:port of the Mooncake master"
        )
    extra = {MOONCAKE_KEY: _absolute(source), **(block.extra_config or {})}
    return Expansion({"kv_connector": MOONCAKE, "kv_role": block.kv_role, EXTRA: extra}, None, master)


def _absolute(path: str) -> str:
    """Ray's workers run in folders of their own."""
    return os.path.abspath(os.path.expanduser(path))
