"""verl's `rollout.kv_store` block: its keys, what it expands to, and whether that is there before engines are started.

The keys are those that verl-project/verl#6373 describes; verl itself never got them.
"""

import asyncio
import logging
import os
from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

import msgspec

from epochkv_connector.config import ConnectorConfig, explain, shown
from epochkv_fence.client.probe import NoHub, is_inside, probe_hub, probe_master
from epochkv_fence.common import on_daemon_thread
from epochkv_fence.connection import CONFIG_ENV, ConfigurationError, Connection, read_document
from epochkv_fence.launch import EXTRA, transfer_config

logger = logging.getLogger(__name__)

WHERE: Final = "rollout.kv_store"


class BlockError(ValueError):
    """The block cannot be used; the message names the field and what is wrong with it. `on_failure` does not apply."""


class KvStore(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The block."""

    enable: bool = False  # whether rollout engines get a connector
    kv_connector: Literal["EpochKVConnector"] = "EpochKVConnector"
    kv_role: Literal["kv_both", "kv_producer", "kv_consumer"] = "kv_both"  # whether an engine saves KV, loads it, or both
    config_path: str | None = None  # the pool's `connection.json`; None: `EPOCHKV_CONFIG` names it, or holds it
    extra_config: dict[str, Any] = {}  # more keys of `kv_connector_extra_config`; they win over the file
    on_failure: Literal["fallback", "crash"] = "fallback"  # when hub or master does not answer at launch: run without the connector, or end


def parse(given: Any) -> KvStore:
    """The block. Raises BlockError: a key that is unknown, or a value that is not allowed."""
    content = plain(given)
    try:
        return msgspec.convert(content, KvStore)
    except msgspec.ValidationError as error:
        raise BlockError(f"{WHERE}: {explain(error, content)[1]}; docs/trainers/verl.md says what each key may be") from None


def plain(value: Any) -> Any:
    """Mappings and lists of any kind (OmegaConf has its own) as those of Python."""
    if isinstance(value, Mapping):
        return {str(key): plain(value[key]) for key in value}
    if isinstance(value, (str, bytes)) or not hasattr(value, "__iter__"):
        return value
    return [plain(one) for one in value]


class Expansion(NamedTuple):
    """What engines get, and what they will need."""

    transfer: dict[str, Any]  # `kv_transfer_config`
    config: ConnectorConfig  # what the connector will make of it
    connection: Connection  # the way to the pool's hub; its `origin` is what names the pool, for errors


def expand(block: KvStore, environ: Mapping[str, str]) -> Expansion:
    """What an enabled block stands for. Raises BlockError: the file is missing, cannot be read, or is not a pool's."""
    named, source = "config_path", block.config_path or ""
    if not source.strip():
        named, source = CONFIG_ENV, environ.get(CONFIG_ENV, "").strip()
    if not source:
        raise BlockError(f"{WHERE}: config_path is missing; it must be the path of a connection.json, or set {CONFIG_ENV}")
    try:
        if source.lstrip().startswith("{"):  # in the driver's environment, which engines need not have
            extra = {**read_document(source, environ, named).content, **block.extra_config}
        else:  # Ray's workers run in folders of their own
            extra = {**block.extra_config, "config_file": os.path.abspath(os.path.expanduser(source))}
        config = ConnectorConfig.parse(extra, environ)
        if config.hub is None:
            raise BlockError(f"{WHERE}: {shown(source)} has no key hub; give the connection.json of a pool")
        connection = Connection(config.pool, config.hub, "extra_config" if "pool" in block.extra_config else named, environ)
        connection.client_keys()
    except ConfigurationError as error:
        raise BlockError(f"{WHERE}: {error}".replace(f"{EXTRA}: config_file", named).replace(EXTRA, "extra_config")) from None
    return Expansion(transfer_config(extra, block.kv_role), config, connection)


TRANSFER: Final = "kv_transfer_config"


class StoreUnreachable(RuntimeError):
    """Hub or master does not answer, and `on_failure` is crash."""


def resolve(given: Any, rollout: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> dict[str, Any] | None:
    """The `kv_transfer_config` that the block stands for; None: engines run without a connector. Raises BlockError and StoreUnreachable.

    Args:
        rollout: what the block stands in; of interest are `name`, `engine_kwargs` and `disaggregation`.
    """
    block = parse(given)
    if not block.enable:
        return None
    _check_beside(rollout)
    expansion = expand(block, environ)
    # On a thread of its own: the caller may be in an event loop.
    problem = on_daemon_thread(lambda: asyncio.run(find_problem(expansion)), "epochkv-probe").result()
    if problem is None:
        if not expansion.config.has_tiers:
            logger.warning("EpochKV: %s: no tier is named; add local or distributed to the connection.json or to extra_config", WHERE)
        return expansion.transfer
    if block.on_failure == "crash":
        raise StoreUnreachable(f"{WHERE}: {problem}; on_failure is crash; start it, or set on_failure to fallback to train without it")
    logger.warning("EpochKV: %s: %s; on_failure is fallback, so rollout engines run without the connector", WHERE, problem)
    return None


async def find_problem(expansion: Expansion) -> str | None:
    """What does not answer, in words; None: all does. Raises BlockError: the hub serves another pool."""
    answer = await probe_hub(expansion.connection)
    if isinstance(answer, NoHub):
        if answer.trouble == "pool":
            raise BlockError(f"{WHERE}: {expansion.connection.origin} names another pool than its hub serves: {answer.text}")
        return f"the hub {answer.endpoint} cannot be used: {answer.text}"
    if expansion.config.distributed is not None:
        master = expansion.config.distributed.master_address
        dialled, text = await probe_master(master)
        # A name that only a cluster knows is its engines' affair.
        if dialled != "open" and not (dialled == "unresolved" and is_inside(master.rpartition(":")[0])):
            return f"the Mooncake master {master} cannot be used: {text}"
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
