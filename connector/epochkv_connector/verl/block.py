"""The keys of `actor_rollout_ref.rollout.kv_store`, and the sentence for a wrong one. Pure.

The keys are those that verl-project/verl#6373 describes; verl itself never got them. There, Mooncake was the only connector. Here
the file at `config_path` tells which connector is meant, so a block that was written for that change still means the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from epochkv_connector.config import schema

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


_KEYS: Final = schema.keys_of(KvStore)


def parse(given: Any) -> KvStore:
    """The block.

    Raises:
        BlockError: a key that is unknown, or a value that is not allowed.
    """
    content = plain(given)
    if not isinstance(content, dict):
        raise BlockError(f"{WHERE} is {schema.shown(content)}; it must be a block with the keys {', '.join(_KEYS)}")
    found = schema.problem(content, _KEYS)
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
