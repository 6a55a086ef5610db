"""The entry point that vLLM calls first in every process (`vllm.general_plugins`).

It registers the connector: `kv_connector_module_path` suffices for the connector alone, but a MultiConnector rebuilds its
children's stats through the registry. It configures the connector where the environment asks for it (`attach`). It has weights
digested before a kernel packs them away.

And it checks configurations early: vLLM makes connectors after it has loaded the model, in processes of their own, so a wrong
key would end the start minutes later, with one trace per process. The check runs as soon as vLLM has made its configuration, in
the process that the user started. vLLM's own commands then end with one line. Knows of vLLM: `KVConnectorFactory`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from epochkv_connector.config.connector_config import NAME, ConfigError
from epochkv_connector.engine import limits
from epochkv_connector.engine.attach import before_engine, in_their_words, is_attached, refuse_other_pool
from epochkv_connector.engine.fenced import switch
from epochkv_connector.engine.version import UnsupportedEngine, warn_of_frameworks
from epochkv_fence.connection import ATTACH_ENV


def register() -> None:
    """Called by vLLM in every process, possibly more than once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from epochkv_connector.engine import patches
    from epochkv_connector.engine.fenced import fence
    from epochkv_connector.weights.held import mark

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "epochkv_connector.connector", NAME)
    patches.around_arguments(attach, check)
    patches.before_packing(mark)
    fence.install()


def attach(arguments: Any) -> None:
    """Join an engine to the pool that the environment names; see `attach.before_engine`.

    Raises:
        ConfigError: the message says what to change.
        SystemExit: the same as one line, in a command of vLLM.
    """
    with _one_line():
        before_engine(arguments)


def check(vllm_config: Any) -> None:
    """Refuse an engine that our connector would refuse once its model is loaded.

    Raises:
        ConfigError, UnsupportedEngine: the message says what to change.
        SystemExit: the same as one line, in a command of vLLM.
    """
    attached = is_attached(vllm_config.kv_transfer_config)
    with _one_line(
        f"; or unset {ATTACH_ENV}, which joined this engine to the pool" if attached else "", in_their_words if attached else str
    ):
        ours = limits.check_before_load(vllm_config)
        fenced = switch.check(vllm_config) is not None
        if fenced:
            refuse_other_pool(os.environ)
        if fenced or ours:
            warn_of_frameworks()


@contextmanager
def _one_line(remedy: str = "", said: Callable[[str], str] = str) -> Iterator[None]:
    try:
        yield
    except (ConfigError, UnsupportedEngine) as error:
        text = f"{said(str(error))}{remedy}"
        if is_command_of_vllm():
            raise SystemExit(f"EpochKV cannot start: {text}") from None
        raise type(error)(text) from None


def is_command_of_vllm() -> bool:
    """Whether this process runs `vllm ...` or `python -m vllm...`, rather than a program that could catch an error."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    return module.name.startswith("vllm.") if module is not None else Path(sys.argv[0]).name == "vllm"
