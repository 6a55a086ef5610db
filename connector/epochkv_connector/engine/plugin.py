"""Registers the connector by name, checks its configuration before anything is loaded, and has weights looked at before a kernel
packs them away (`vllm.general_plugins` entry point).

`kv_connector_module_path` suffices for the connector alone; a MultiConnector rebuilds its children's stats through the
registry, so as a child it must be registered.

vLLM makes connectors after it has loaded the model, in processes of their own: a wrong key would end the start minutes
later, under one trace for each process. Plugins are called first of all, in the process that the user started, so what
its command line says, or the Python call that makes an engine, is checked here, and a mistake is one line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Sequence
from typing import Any

from epochkv_connector.config.keys import ConfigError, ConnectorConfig
from epochkv_connector.engine.devices import check_devices
from epochkv_connector.engine.memory import check_fits, check_holds_something
from epochkv_connector.weights import packed

NAME = "EpochKVConnector"
OPTION = "--kv-transfer-config"
CONFIG_OPTION = "--config"
LAUNCHER_OPTION = "--distributed-executor-backend"
RANK_OPTIONS = (
    ("--tensor-parallel-size", "-tp"),
    ("--pipeline-parallel-size", "-pp"),
    ("--data-parallel-size", "-dp"),
    ("--prefill-context-parallel-size", "-pcp"),
)
"""Options whose product is the number of ranks that a launcher starts; `EngineArgs` has fields of the long names."""
ELSEWHERE = frozenset({"--nnodes", "-n", "--distributed-executor-backend"})
"""With these the ranks, and so L1, may be on other machines than this process."""


def register() -> None:
    """Called by vLLM in every process, possibly more than once.

    Raises:
        SystemExit: the command line holds a configuration with which no engine can start; the message says what to change.
        ConfigError, compat.UnsupportedEngine: the same of a configuration that is given in Python.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "epochkv_connector.connector", NAME)
    check_command_line(sys.argv[1:])
    check_callers()
    packed.listen()


def check_command_line(arguments: Sequence[str]) -> None:
    """End the process with one line if these arguments configure the connector in a way that it will refuse.

    Raises:
        SystemExit: see above.
    """
    expanded = _expanded(arguments)
    here = not _names([*arguments, *expanded]) & ELSEWHERE
    transfer = _transfer_config(expanded)
    try:
        _check_transfer(transfer, here)
        _check_launcher(transfer, _value_of(expanded, LAUNCHER_OPTION), [_value_of(expanded, *names) for names in RANK_OPTIONS])
    except (ConfigError, RuntimeError) as error:
        raise SystemExit(f"EpochKV cannot start: {error}") from None


def check_callers() -> None:
    """Check what a Python program gives to `LLM(...)` or `EngineArgs(...)`: the first of them in a process calls the plugins.

    Raises:
        ConfigError, compat.UnsupportedEngine: no engine can start with it.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        owner = frame.f_locals.get("self")
        if frame.f_code.co_name == "__post_init__" and "EngineArgs" in [kind.__name__ for kind in type(owner).__mro__]:
            given = getattr(owner, "kv_transfer_config", None)
            transfer = given if isinstance(given, dict) else getattr(given, "__dict__", None)
            _check_transfer(transfer)
            sizes = [getattr(owner, names[0].lstrip("-").replace("-", "_"), None) for names in RANK_OPTIONS]
            _check_launcher(transfer, getattr(owner, "distributed_executor_backend", None), sizes)


def check(extra: dict[str, Any], here: bool = False) -> None:
    """What can be said of a configuration before a model is loaded. `here`: every rank, and so L1, is on this machine.

    Raises:
        ConfigError, compat.UnsupportedEngine: no engine can start with it.
    """
    config = ConnectorConfig.parse(extra)
    check_holds_something(config)
    if here:
        check_devices(config)
        if config.local is not None:
            check_fits(config.local.capacity_bytes, "local.capacity_bytes", config.local.capacity_bytes)
    from epochkv_connector.engine import compat

    compat.check_version(config.allow_untested_vllm)


def _names(arguments: Sequence[str]) -> set[str]:
    return {argument.partition("=")[0].replace("_", "-") for argument in arguments}


def _expanded(arguments: Sequence[str]) -> Sequence[str]:
    """The arguments with `--config FILE` and dotted options (`--kv-transfer-config.kv_role kv_both`) as vLLM's own parser reads them.

    What it cannot read stays as it is: vLLM says so itself, a moment later.
    """
    if CONFIG_OPTION not in arguments and not any(name.startswith(f"{OPTION}.") for name in _names(arguments)):
        return arguments
    try:
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError:
        return arguments

    class Reader(FlexibleArgumentParser):
        read: Sequence[str] = arguments

        def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
            self.read = list(args)
            return argparse.Namespace(), []

    reader = Reader(add_help=False)
    with contextlib.suppress(Exception, SystemExit):
        reader.parse_args(list(arguments))
    return reader.read


def _transfer_config(arguments: Sequence[str]) -> Any:
    """What the last such option says; None if it cannot be read (vLLM says so itself)."""
    try:
        return json.loads(_value_of(arguments, OPTION) or "null")
    except (ValueError, RecursionError):
        return None


def _value_of(arguments: Sequence[str], *names: str) -> str | None:
    """What the last of these options says."""
    given: str | None = None
    for place, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name.replace("_", "-") in names:
            given = value if equals else next(iter(arguments[place + 1 : place + 2]), None)
    return given


def _check_launcher(transfer: Any, backend: Any, sizes: Sequence[Any]) -> None:
    """Check how the ranks are started, if our connector is in this `kv_transfer_config`. What is no number counts as one rank."""
    if backend is None or not isinstance(transfer, dict):
        return
    extra = transfer.get("kv_connector_extra_config")
    children = extra.get("connectors") if isinstance(extra, dict) else None
    given = [transfer, *(children if isinstance(children, list) else [])]
    if any(isinstance(one, dict) and one.get("kv_connector") == NAME for one in given):
        from epochkv_connector.engine import compat

        compat.check_launcher(backend, math.prod(int(size) for size in sizes if str(size).isdecimal()))


def _check_transfer(transfer: Any, here: bool = False) -> None:
    """Check our connector in a `kv_transfer_config`, alone or as a child of a MultiConnector, whose other children count, too."""
    if not isinstance(transfer, dict):
        return
    extra = transfer.get("kv_connector_extra_config", {})
    if not isinstance(extra, dict):
        return
    if transfer.get("kv_connector") == NAME:
        check(extra, here)
    elif transfer.get("kv_connector") == "MultiConnector" and isinstance(extra.get("connectors"), list):
        children = [child for child in extra["connectors"] if isinstance(child, dict)]
        if not any(child.get("kv_connector") == NAME for child in children):
            return
        for child in children:
            if child.get("kv_connector") == NAME:
                _check_transfer(child, here)
        from epochkv_connector.engine import compat

        compat.check_siblings([str(child.get("kv_connector")) for child in children])
