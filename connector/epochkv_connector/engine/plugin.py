"""What the entry point (`entry`) does in every process of vLLM.

It registers the connector: `kv_connector_module_path` suffices for the connector alone, but a MultiConnector rebuilds its
children's stats through the registry. It has weights digested before a kernel packs them away. And it switches the connector on
where the environment asks for it, for trainers that start engines and have no field for a `kv_transfer_config`: `EPOCHKV_ATTACH=1`
gives every engine of a process tree what the user would have configured, before vLLM makes its configuration. Nothing behind that
knows of it. The pool comes from `EPOCHKV_CONFIG`; L1 comes from there, too, or from `EPOCHKV_LOCAL_CAPACITY`.

And it checks configurations early: vLLM makes connectors after it has loaded the model, in processes of their own, so a wrong
key would end the start minutes later, with one trace per process. The check runs as soon as vLLM has made its configuration, in
the process that the user started. vLLM's own commands then end with one line.
"""

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

from epochkv_connector.config import MAX_BYTES, MIN_BYTES, ConnectorConfig, shown, shown_size
from epochkv_connector.engine import answers, describe, fenced, limits, patches
from epochkv_connector.engine.injected import is_injected, leave
from epochkv_connector.engine.interface import UnsupportedEngine
from epochkv_connector.engine.patches import share_log_handlers
from epochkv_fence import quantity
from epochkv_fence.connection import ATTACH_ENV, CAPACITY_ENV, CONFIG_ENV, ConfigurationError, read_client_keys, read_root_secret
from epochkv_fence.launch import MODULE, NAME, transfer_config

logger = logging.getLogger(__name__)


@contextmanager
def _one_line() -> Iterator[None]:
    try:
        yield
    except (ConfigurationError, UnsupportedEngine) as error:
        if is_command_of_vllm():
            raise SystemExit(f"EpochKV cannot start: {error}") from None
        raise


def is_command_of_vllm() -> bool:
    """Whether this process runs `vllm ...` or `python -m vllm...`, rather than a program that could catch an error."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    return module.name.startswith("vllm.") if module is not None else Path(sys.argv[0]).name == "vllm"


@_one_line()
def before_engine(arguments: Any, environ: Mapping[str, str] = os.environ) -> None:
    """Configure the connector for an engine that has none, if the environment says so.

    Raises:
        ConfigurationError: a variable has a value that it cannot have; the message names it and the remedy.
        SystemExit: the same as one line, in a command of vLLM.
    """
    if not is_on(environ) or getattr(arguments.kv_transfer_config, "kv_connector", None) == NAME:  # vLLM's commands ask twice
        return
    share_log_handlers()
    found = _configured(arguments)
    if found:
        logger.info("EpochKV: %s is 1, but this engine has %s, which stays as it is", ATTACH_ENV, found)
        return
    extra = extra_config(environ)
    config = ConnectorConfig.parse(extra, environ)
    from vllm.config import KVTransferConfig

    arguments.kv_transfer_config = KVTransferConfig(**transfer_config(extra))
    try:
        _read_keys(config, environ)
    except ConfigurationError as error:
        if is_injected(environ):  # rather than serve in bypass
            raise
        logger.warning("EpochKV: %s: this engine cannot join pool %s, and will serve in bypass: %s", ATTACH_ENV, config.pool.name, error)
        return
    level = logging.INFO if config.has_tiers else logging.WARNING
    logger.log(level, "EpochKV: %s joins this engine to pool %s, %s", ATTACH_ENV, config.pool.name, _tiers(config))


def _read_keys(config: ConnectorConfig, environ: Mapping[str, str]) -> None:
    if config.hub is not None:
        read_client_keys(config.hub, environ)
        read_root_secret(config.hub, environ)


def is_on(environ: Mapping[str, str]) -> bool:
    """Whether `EPOCHKV_ATTACH` is 1."""
    value = environ.get(ATTACH_ENV, "").strip()
    if value not in ("", "0", "1"):
        raise ConfigurationError(f"{ATTACH_ENV} is {shown(value)}; it must be 1, or 0 for off")
    return value == "1"


def extra_config(environ: Mapping[str, str]) -> dict[str, Any]:
    """`kv_connector_extra_config`: the pool's document stays where it is, so that only a size of our own stands here."""
    if not environ.get(CONFIG_ENV, "").strip():
        raise ConfigurationError(
            f"{ATTACH_ENV} is 1 and {CONFIG_ENV} is not set; set it to the path of the pool's connection.json or to its text, "
            f"or unset {ATTACH_ENV}"
        )
    text = environ.get(CAPACITY_ENV, "").strip()
    if not text:
        return {}
    return {"local": {"capacity_bytes": size} if (size := capacity(text)) else None}


def capacity(text: str) -> int:
    """Bytes of a size such as `64Gi` that an L1 can have; 0: no L1."""
    try:
        size = quantity.parse(text)
    except ValueError:
        size = Decimal(-1)
    if size != 0 and not MIN_BYTES <= size <= MAX_BYTES:
        raise ConfigurationError(
            f"{CAPACITY_ENV} is {shown(text)}; it must be a size such as 64Gi, or a number of bytes, from {MIN_BYTES} to "
            f"{quantity.from_bytes(MAX_BYTES)}, or 0 for no L1; or unset it for the L1 of the connection document"
        )
    return quantity.to_bytes(text)


def _configured(arguments: Any) -> str:
    """What gives this engine a connector already, in words; empty: nothing."""
    if arguments.kv_transfer_config is not None:
        return "a kv_transfer_config of its own"
    return "kv_offloading_size" if getattr(arguments, "kv_offloading_size", None) is not None else ""


def _tiers(config: ConnectorConfig) -> str:
    tiers = [f"L1 of {shown_size(config.local.capacity_bytes)}"] if config.local is not None else []
    tiers += [f"L2 at {config.distributed.master_address}"] if config.distributed is not None else []
    return " and ".join(tiers) or f"without a tier: set {CAPACITY_ENV} to a size for an L1, or add local or distributed to {CONFIG_ENV}"


def register() -> None:
    from vllm.config import VllmConfig

    from epochkv_connector.weights.digest import mark

    _register_name()
    patches.around_arguments(before_engine, check, leave if is_injected() else None)
    patches.wrap(VllmConfig, "_resolve_mm_embedding_inputs", limits.keep_embeddings_out)
    patches.before_packing(mark)
    fenced.install()


def _register_name() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)


def join_front_end() -> None:
    """What requests and answers need where they enter and leave; may be called again."""
    _register_name()
    patches.mark_media_ids()
    answers.install()


@_one_line()
def check(vllm_config: Any) -> None:
    """Refuse an engine that our connector would refuse once its model is loaded, and note what its processes will not know. Raises as
    `limits.check_start`, or `SystemExit` with one line in a command of vLLM."""
    describe.note_cores(vllm_config)
    limits.check_before_load(vllm_config)
    join_front_end()
    config = fenced.check(vllm_config)
    if config is not None and is_injected():
        _read_keys(config, os.environ)
