"""Registers the connector by name, and checks its configuration before anything is loaded (`vllm.general_plugins` entry point).

`kv_connector_module_path` suffices for the connector alone; a MultiConnector rebuilds its children's stats through the
registry, so as a child it must be registered.

vLLM makes connectors after it has loaded the model, in processes of their own: a wrong key would end the start minutes
later, under one trace for each process. Plugins are called first of all, in the process that the user started, so what
its command line says is checked here, and a mistake is one line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from epochkv_connector.config import ConfigError, ConnectorConfig
from epochkv_connector.memory import check_fits

NAME = "EpochKVConnector"
OPTION = "--kv-transfer-config"
ELSEWHERE = frozenset({"--nnodes", "-n", "--distributed-executor-backend"})
"""With these the ranks, and so L1, may be on other machines than this process."""


def register() -> None:
    """Called by vLLM in every process, possibly more than once.

    Raises:
        SystemExit: the command line holds a configuration with which no engine can start; the message says what to change.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "epochkv_connector.connector", NAME)
    check_command_line(sys.argv[1:])


def check_command_line(arguments: Sequence[str]) -> None:
    """End the process with one line if these arguments configure the connector in a way that it will refuse.

    Configurations given in any other way (Python, a YAML file, dotted options) are checked when the connector is made.

    Raises:
        SystemExit: see above.
    """
    for extra in _extra_configs(arguments):
        try:
            config = ConnectorConfig.parse(extra)
            if config.local is not None and not _names(arguments) & ELSEWHERE:
                check_fits(config.local.capacity_bytes, "local.capacity_bytes", config.local.capacity_bytes)
            from epochkv_connector import compat

            compat.check_version(config.allow_untested_vllm)
        except (ConfigError, RuntimeError) as error:
            raise SystemExit(f"EpochKV cannot start: {error}") from None


def _names(arguments: Sequence[str]) -> set[str]:
    return {argument.partition("=")[0].replace("_", "-") for argument in arguments}


def _extra_configs(arguments: Sequence[str]) -> Iterator[dict[str, Any]]:
    """What the last such option says for each of our connectors in it; nothing if it cannot be read (vLLM says so itself)."""
    given: str | None = None
    for place, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name.replace("_", "-") == OPTION:
            given = value if equals else next(iter(arguments[place + 1 : place + 2]), None)
    try:
        transfer = json.loads(given or "null")
    except (ValueError, RecursionError):
        return
    yield from _ours(transfer)


def _ours(transfer: Any) -> Iterator[dict[str, Any]]:
    extra = transfer.get("kv_connector_extra_config", {}) if isinstance(transfer, dict) else None
    if not isinstance(extra, dict):
        return
    if transfer.get("kv_connector") == NAME:
        yield extra
    elif transfer.get("kv_connector") == "MultiConnector" and isinstance(extra.get("connectors"), list):
        for child in extra["connectors"]:
            if isinstance(child, dict) and child.get("kv_connector") != "MultiConnector":
                yield from _ours(child)
