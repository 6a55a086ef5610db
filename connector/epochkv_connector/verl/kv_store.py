"""verl's `rollout.kv_store` block: its keys, what it expands to, and whether that is there before engines are started.

The keys are those that verl-project/verl#6373 describes; verl itself never got them. There, Mooncake was the only connector. Here
the file at `config_path` tells which connector is meant, so a block that was written for that change still means the same.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from epochkv_connector.config import (
    EXTRA,
    MOONCAKE,
    MOONCAKE_ENV,
    MOONCAKE_KEY,
    NAME,
    ConfigError,
    ConnectorConfig,
    first_problem,
    keys_of,
    shown,
    transfer_config,
)
from epochkv_fence.client.probe import NoHub, apart, is_inside, probe_hub, probe_master
from epochkv_fence.connection import CONFIG_ENV, ConfigurationError, Connection, read_document

logger = logging.getLogger(__name__)

WHERE: Final = "rollout.kv_store"


class BlockError(ValueError):
    """The block cannot be used; the message names the field and what is allowed. `on_failure` does not apply."""


class KvStore(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The block."""

    enable: Annotated[bool, Meta(description="Whether rollout engines get a connector.")] = False
    kv_connector: Annotated[
        Literal["EpochKVConnector", "MooncakeStoreConnector"] | None,
        Meta(description="vLLM's name of the connector. Without it, the file at `config_path` tells."),
    ] = None
    kv_role: Annotated[
        Literal["kv_both", "kv_producer", "kv_consumer"], Meta(description="Whether an engine saves KV, loads it, or both.")
    ] = "kv_both"
    config_path: Annotated[
        str | None,
        Meta(
            description="The pool's `connection.json`, or the file of Mooncake's clients. Without it, `EPOCHKV_CONFIG` or "
            "`MOONCAKE_CONFIG_PATH` names it.",
            extra={"allowed": "the path of a JSON file", "fits": lambda value: value.strip() != ""},
        ),
    ] = None
    extra_config: Annotated[
        dict[str, Any] | None,
        Meta(
            description="More keys of `kv_connector_extra_config`; they win over the file.",
            extra={"allowed": "a mapping of keys of kv_connector_extra_config"},
        ),
    ] = None
    on_failure: Annotated[
        Literal["fallback", "crash"],
        Meta(description="When hub or master does not answer at launch: run without the connector, or end."),
    ] = "fallback"


_KEYS: Final = keys_of(KvStore)


def parse(given: Any) -> KvStore:
    """The block.

    Raises:
        BlockError: a key that is unknown, or a value that is not allowed.
    """
    content = plain(given)
    if not isinstance(content, dict):
        raise BlockError(f"{WHERE} is {shown(content)}; it must be a block with the keys {', '.join(_KEYS)}")
    found = first_problem(content, _KEYS)
    if found is not None:
        raise BlockError(f"{WHERE}: {found[1]}")
    return msgspec.convert(content, KvStore)


def plain(value: Any) -> Any:
    """Mappings and lists of any kind (OmegaConf has its own) as those of Python."""
    if isinstance(value, Mapping):
        return {str(key): plain(value[key]) for key in value}
    if isinstance(value, (str, bytes)) or not hasattr(value, "__iter__"):
        return value
    return [plain(one) for one in value]


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
            f"{WHERE}: {named} is {shown(source)}, which has neither the key pool (a connection.json of EpochKV) nor {MASTER} "
            "(a file of Mooncake's clients); give one of them"
        )
    if block.kv_connector not in (None, kind):
        raise BlockError(
            f"{WHERE}: kv_connector is '{block.kv_connector}', but {named} is {shown(source)}, a file for {kind}; "
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
            raise BlockError(f"{WHERE}: {shown(source)} has no key hub; give the connection.json of a pool")
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
        raise BlockError(f"{WHERE}: {shown(source)}: {MASTER} is {shown(master)}; it must be host:port of the Mooncake master")
    extra = {MOONCAKE_KEY: _absolute(source), **(block.extra_config or {})}
    return Expansion({"kv_connector": MOONCAKE, "kv_role": block.kv_role, EXTRA: extra}, None, master)


def _absolute(path: str) -> str:
    """Ray's workers run in folders of their own."""
    return os.path.abspath(os.path.expanduser(path))


TRANSFER: Final = "kv_transfer_config"


class StoreUnreachable(RuntimeError):
    """Hub or master does not answer, and `on_failure` is crash."""


def resolve(given: Any, rollout: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> dict[str, Any] | None:
    """The `kv_transfer_config` that the block stands for; None: engines run without a connector.

    Args:
        given: the block.
        rollout: what it stands in; of interest are `name`, `engine_kwargs` and `disaggregation`.

    Raises:
        BlockError: the block cannot be meant.
        StoreUnreachable: see there.
    """
    block = parse(given)
    if not block.enable:
        return None
    _check_beside(rollout)
    expansion = expand(block, environ)
    problem, _ = apart(lambda: find_problem(expansion))
    if problem is None:
        if not expansion.has_tiers:
            logger.warning("EpochKV: %s: %s names no tier; add local or distributed to it or to extra_config", WHERE, expansion.source)
        return expansion.transfer
    if block.on_failure == "crash":
        raise StoreUnreachable(f"{WHERE}: {problem}; on_failure is crash; start it, or set on_failure to fallback to train without it")
    logger.warning("EpochKV: %s: %s; on_failure is fallback, so rollout engines run without the connector", WHERE, problem)
    return None


async def find_problem(expansion: Expansion) -> str | None:
    """What does not answer, in words; None: all does.

    Raises:
        BlockError: the hub serves another pool.
    """
    if expansion.connection is not None:
        answer = await probe_hub(expansion.connection)
        if isinstance(answer, NoHub):
            if answer.trouble == "pool":
                raise BlockError(f"{WHERE}: {expansion.source} names another pool than its hub serves: {answer.text}")
            return f"the hub {answer.endpoint} cannot be used: {answer.text}"
    if expansion.master is not None:
        dialled, text = await probe_master(expansion.master)
        # A name that only a cluster knows is its engines' affair.
        if dialled != "open" and not (dialled == "unresolved" and is_inside(expansion.master.rpartition(":")[0])):
            return f"the Mooncake master {expansion.master} cannot be used: {text}"
    return None


def _check_beside(rollout: Mapping[str, Any]) -> None:
    """Raise `BlockError` where verl would ignore or overwrite what the block stands for."""
    name = rollout.get("name")
    if name != "vllm":
        raise BlockError(f"{WHERE}: enable is true, but rollout.name is {shown(name)}; it must be vllm, or set enable to false")
    engine = (plain(rollout.get("engine_kwargs") or {}).get("vllm") or {}).get(TRANSFER)
    if engine is not None:
        raise BlockError(f"{WHERE}: enable is true, but rollout.engine_kwargs.vllm has a {TRANSFER}, too; remove one of them")
    disaggregation = rollout.get("disaggregation")
    if disaggregation is not None and disaggregation.get("enabled"):
        raise BlockError(
            f"{WHERE}: enable is true, but rollout.disaggregation.enabled, too, and verl then sets its own {TRANSFER}; turn one of them off"
        )
