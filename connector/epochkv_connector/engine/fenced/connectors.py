"""Which connectors of vLLM our names can stand under, by what the keys of each are made of, and what each needs when names change.

Most of them keep KV under vLLM's block hashes, so whoever names the hashes names the keys. Some copy hashes of a request, and have to
copy them again when the request is named anew. Knows of vLLM 0.30 to 0.33: `OffloadingConnectorScheduler._req_status`,
`MooncakeStoreScheduler.load_specs` and its lookup client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from epochkv_connector.engine.limits import MULTI
from epochkv_connector.engine.version import UnsupportedEngine

_FROM_TOKENS = "it makes its keys from tokens alone, so no name of ours reaches them and KV of older weights would be found"
_REMEDY = "use EpochKVConnector, MooncakeStoreConnector or OffloadingConnector in its place, or unset EPOCHKV_FENCE"

REFUSED = {
    "AIBrixOffloadingConnectorV1Type1": _FROM_TOKENS,
    "DecodeBenchConnector": "it fills blocks with numbers that no model has computed",
    "ExampleConnector": _FROM_TOKENS,
    "FlexKVConnectorV1": _FROM_TOKENS,
    "HF3FSKVConnector": _FROM_TOKENS,
    "LMCacheConnectorV1": "it makes its keys from tokens, in a library that was not tested with names of ours",
    "LMCacheMPConnector": "it makes its keys from tokens and the request's salt, in a library that was not tested with names of ours",
}
"""Connectors that were looked at, and why they cannot be fenced."""


class Foreign(NamedTuple):
    """A connector that names of ours can stand under.

    Attributes:
        prepare: once, with the scheduler's half; raises `UnsupportedEngine` where it is not as it was.
        renamed: a request has other names; the number says how many of its hash blocks keep theirs.
    """

    prepare: Callable[[Any], None] = lambda connector: None
    renamed: Callable[[Any, Any, int], None] = lambda connector, request, num_kept: None


def why_refused(name: str, module: str) -> str | None:
    """Why an engine with this connector cannot be fenced, and what to do; None: it can. `module`: its `kv_connector_module_path`."""
    if module:
        remedy = f"remove kv_connector_module_path for vLLM's own {name}, or unset EPOCHKV_FENCE" if name in KNOWN else _REMEDY
        return f"kv_connector_module_path is {module}, and nobody has looked at what its keys are made of; {remedy}"
    if name in (*KNOWN, MULTI):
        return None
    why = REFUSED.get(name, "nobody has looked at what its keys are made of")
    return f"{why}; {_REMEDY}"


def leaves(connector: Any | None) -> Iterator[Any]:
    """The connector itself, or all that a MultiConnector holds."""
    children = getattr(connector, "sub_connectors", None)
    if children is not None:
        for child in children:
            yield from leaves(child)
    elif connector is not None:
        yield connector


def prepare(connector: Any | None) -> None:
    """Make the scheduler's half of a connector, and of those that it holds, ready for names that change.

    Raises:
        UnsupportedEngine: one is not as it was when it was looked at.
    """
    for one in leaves(connector):
        KNOWN[type(one).__name__].prepare(one)


def renamed(connector: Any | None, request: Any, num_kept: int) -> None:
    """Have a connector, and those that it holds, forget what they remember of the names of a request."""
    for one in leaves(connector):
        KNOWN[type(one).__name__].renamed(one, request, num_kept)


def _need(owner: Any, name: str, *attributes: str) -> None:
    missing = [attribute for attribute in attributes if not hasattr(owner, attribute)]
    if missing:
        raise UnsupportedEngine(
            f"EPOCHKV_FENCE is set and {name} of this vLLM has no {', '.join(missing)}, where it keeps names of requests; {_REMEDY}"
        )


def _prepare_offloading(connector: Any) -> None:
    _need(connector.connector_scheduler, "OffloadingConnector", "_req_status", "config")
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler

    fields = {*scheduler.RequestGroupState.__dataclass_fields__, *scheduler.GroupOffloadConfig._fields}
    wanted = {"offload_keys", "next_stored_chunk_idx", "hashes_per_chunk"}
    if not wanted <= fields:
        _need(scheduler.RequestGroupState, "OffloadingConnector", *sorted(wanted - fields))


def _rename_offloaded(connector: Any, request: Any, num_kept: int) -> None:
    """It copies a request's hashes, each once. It copies again what is not there, before it looks or stores."""
    side = connector.connector_scheduler
    status = side._req_status.get(request.request_id)
    if status is None:
        return
    for group, state in zip(side.config.kv_group_configs, status.group_states, strict=True):
        kept = num_kept // group.hashes_per_chunk
        del state.offload_keys[kept:]
        state.next_stored_chunk_idx = min(state.next_stored_chunk_idx, kept)


def _prepare_mooncake(connector: Any) -> None:
    """Its reset empties the whole master, under every other engine. Names do what the reset is for."""
    _need(connector.connector_scheduler, "MooncakeStoreConnector", "load_specs", "client")
    _need(connector.connector_scheduler.client, "MooncakeStoreConnector's client", "discard")
    connector.reset_cache = lambda: True


def _rename_in_mooncake(connector: Any, request: Any, num_kept: int) -> None:
    """Its look-up may be under way, or answered, under the names before. What it stores, it names when it stores."""
    if num_kept == 0:
        connector.connector_scheduler.client.discard(request.request_id)
        connector.connector_scheduler.load_specs.pop(request.request_id, None)


_BY_REQUEST = Foreign()
"""Blocks of one request come from another engine (P/D). The tag of that engine says whether they may have our names (`naming.pins`)."""

KNOWN = {
    "MooncakeConnector": _BY_REQUEST,
    "MooncakeStoreConnector": Foreign(_prepare_mooncake, _rename_in_mooncake),
    "MoRIIOConnector": _BY_REQUEST,
    "NixlConnector": _BY_REQUEST,
    "NixlPullConnector": _BY_REQUEST,
    "NixlPushConnector": _BY_REQUEST,
    "OffloadingConnector": Foreign(_prepare_offloading, _rename_offloaded),
    "SimpleCPUOffloadConnector": Foreign(),  # it looks up by a request's hashes of that moment, and stores under vLLM's name of the block
}
"""Connectors whose keys are vLLM's block hashes, or that bring blocks of one request."""
