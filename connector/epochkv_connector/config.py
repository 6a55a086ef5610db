"""The connector's configuration: parsed once at the edge; every error names the key, the value and what is wrong with it.

The keys come from `kv_connector_extra_config`. `config_file` or the environment variable `EPOCHKV_CONFIG` may name a JSON file
with the same keys, and the variable may hold the JSON itself; inline keys win. So an engine that a trainer starts can join
with a file, or its environment, alone. Clients use the same `pool` and `hub` (`epochkv_fence.connection`).

A field declares its key once (`msgspec.Meta`): type, bounds and description, and in `extra` what the reference page says besides:
`allowed` (what a text may be) and `unit` (of a number). Last, the memory that this machine can give. Needs neither vLLM nor torch.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from epochkv_fence.connection import CONFIG_ENV, ConfigurationError, HubRef, PoolRef, check_endpoint, check_pool, read_document
from epochkv_fence.launch import EXTRA

MAX_SHOWN = 80
MAX_TEXT = 200
_HOST_PORT = r"(\[[0-9A-Fa-f:.%]+\]|[^\s\[\]/@;,]+):[1-9][0-9]{0,4}"
_ERROR = re.compile(r"(?P<what>.*?)(?: - at `\$\.?(?P<path>[^`]*)`)?", re.DOTALL)
_FIELD = re.compile(r"Object (?P<state>.*) field `(?P<name>.*)`", re.DOTALL)


def shown(value: Any) -> str:
    """A value in an error: as the JSON it was, short, on one line."""
    if isinstance(value, str):
        rendered = repr(value)
    else:
        try:
            rendered = json.dumps(value)
        except (TypeError, ValueError, RecursionError):
            rendered = f"a {type(value).__name__}"
    return rendered if len(rendered) <= MAX_SHOWN else rendered[:MAX_SHOWN] + "..."


def explain(error: msgspec.ValidationError, document: Any) -> tuple[str, str]:
    """What msgspec has found in the document: the top-level key that it is under, and a sentence with the full key and its value."""
    found = _ERROR.fullmatch(str(error))
    assert found is not None
    path = found["path"].split(".") if found["path"] else []
    if (field := _FIELD.fullmatch(found["what"])) is not None:
        path.append(field["name"])
    if not path:
        return "", found["what"]
    value = document
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    key = shown(".".join(path))[1:-1]
    if field is None:
        return path[0], f"{key} is {shown(value)}: {' '.join(found['what'].split())[:MAX_TEXT]}"
    if "missing" in field["state"]:
        return path[0], f"{key} is missing"
    return path[0], f"{key} is {shown(value)}, but there is no such key: take it out, or correct its name"


PAGE: Final = "docs/reference/connector-config.md"
MIN_BYTES: Final = 512
"""Of L1: a block of any model takes at least this (`worker.layout.slot_stride`)."""
MAX_BYTES: Final = 1 << 50


class LocalTier(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """L1."""

    capacity_bytes: Annotated[
        int,
        Meta(
            ge=MIN_BYTES,
            le=MAX_BYTES,
            description="Size of L1 on each machine, or in each container. The worker ranks that vLLM starts there share it evenly, those "
            "of all its data-parallel ranks; no rank takes more than its share. With Ray, all ranks of an engine share it, wherever they "
            "are. The rank whose blocks are largest decides how many blocks L1 holds. It must hold one block on each rank, and fit into "
            "the memory of this machine or container.",
            extra={"unit": "bytes"},
        ),
    ]


class DistributedTier(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """L2: a Mooncake store."""

    master_address: Annotated[
        str,
        Meta(
            pattern=rf"^(etcd://)?{_HOST_PORT}(;{_HOST_PORT})*\Z",
            description="The Mooncake master. While it does not answer, the engine serves without L2.",
            extra={"allowed": "host:port of the Mooncake master, or etcd://host:port;host:port of a replicated one"},
        ),
    ]
    metadata_server: Annotated[
        str,
        Meta(
            pattern=r"^\S+\Z",
            description="How Mooncake's clients find each other. Stores and engines need the same value. `P2PHANDSHAKE` needs no server.",
            extra={"allowed": "P2PHANDSHAKE or the address of Mooncake's metadata server"},
        ),
    ] = "P2PHANDSHAKE"
    protocol: Annotated[Literal["tcp", "rdma"], Meta(description="How blocks travel. It must be the protocol of the stores.")] = "tcp"
    device_name: Annotated[
        str, Meta(description="RDMA devices of this machine, for `rdma`.", extra={"allowed": "names of RDMA devices with commas, or empty"})
    ] = ""
    cluster_id: Annotated[
        str | None,
        Meta(
            description="The `--cluster_id` of masters that agree on a leader by etcd. With another one, no client finds the leader.",
            extra={"allowed": "the masters' cluster id"},
        ),
    ] = None
    gid_index: Annotated[
        Annotated[int, Meta(ge=0, le=255)] | None,
        Meta(description="Index of the address that RoCE devices use, where Mooncake finds none or a wrong one."),
    ] = None


class UpTo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first tokens of a request alone."""

    max_tokens: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 40,
            description="Blocks of so many tokens of a request are saved, from its first on. 0: nothing.",
            extra={"unit": "tokens"},
        ),
    ]


Save = Literal["All", "Prompts"] | UpTo
"""What of a request is saved."""


class ConnectorConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything the connector can be told. Absent tiers are off; without `hub` this engine is a pool of its own."""

    config_file: Annotated[
        str | None,
        Meta(
            description="A JSON file with the keys of this page, or the folder of a `connection.json`. Keys beside `config_file` win. "
            "Without it, the environment variable `EPOCHKV_CONFIG` names the file or holds the JSON itself.",
            extra={"allowed": "the path of a JSON file"},
        ),
    ] = None
    pool: Annotated[PoolRef, Meta(description="The pool of this engine. Every pool's `connection.json` has it.")]
    hub: Annotated[HubRef | None, Meta(description="The pool's hub. Without it, this engine shares nothing.")] = None
    local: Annotated[LocalTier | None, Meta(description="L1: host memory of this engine. Without it, the engine has no L1.")] = None
    distributed: Annotated[
        DistributedTier | None,
        Meta(description="L2: a Mooncake store that all engines of the pool share. Without it, the engine has no L2."),
    ] = None
    lookup_wait_ms: Annotated[
        float,
        Meta(
            ge=0,
            le=60_000,
            description="How long one scheduler step waits for answers of L2, for all its requests together: at most so long, and at most "
            "a tenth of the last step. A request that is not answered then loses a step.",
            extra={"unit": "milliseconds"},
        ),
    ] = 50.0
    lookup_deadline_ms: Annotated[
        float,
        Meta(
            gt=0,
            le=600_000,
            description="How long L2 may take to answer for one request. After that, only the L1 answer counts.",
            extra={"unit": "milliseconds"},
        ),
    ] = 500.0
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
    trust_media_ids: Annotated[
        bool,
        Meta(
            description="Ids that clients give to pictures, videos and audio (`uuid`) stand for their content: nobody uses one again for "
            "other bytes. Without it, blocks behind such an id reach neither L1 nor L2, unless the request has a `cache_salt`."
        ),
    ] = False
    save: Annotated[
        Save,
        Meta(
            description="What L1 and L2 get of a request: prompt and answer (`All`), its prompt (`Prompts`), or its first tokens "
            "(`max_tokens`). A request may say otherwise: `kv_transfer_params.epochkv.save`. It does not change what is loaded.",
            extra={"allowed": '"All", "Prompts", or an object with max_tokens'},
        ),
    ] = "All"
    stamp: Annotated[
        bool,
        Meta(
            description="Every answer says which weights made which of its tokens, in `kv_transfer_params`. Without it, the answers to "
            "requests that ask for it."
        ),
    ] = False
    allow_untested_vllm: Annotated[bool, Meta(description="Start with a version of vLLM that was not tested, at your own risk.")] = False

    @property
    def has_tiers(self) -> bool:
        """It names L1 or L2."""
        return self.local is not None or self.distributed is not None

    @classmethod
    def parse(cls, extra: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> ConnectorConfig:
        """Build from `kv_connector_extra_config`. Raises ConfigurationError: unknown key, wrong type, impossible value, unreadable file."""
        inline = dict(extra)
        source = inline.pop("config_file", None)
        document, origin = {}, EXTRA
        if source is not None or environ.get(CONFIG_ENV, "").strip():
            found = read_document(source, environ, f"{EXTRA}: config_file")
            document, origin = found.content, found.origin
        merged = {**document, **inline}

        def where(key: str) -> str:
            return origin if key in document and key not in inline else EXTRA

        try:
            config = msgspec.convert(merged, cls)
        except msgspec.ValidationError as error:
            key, sentence = explain(error, merged)
            raise ConfigurationError(f"{where(key)}: {sentence}; {PAGE} says what each key may be") from None
        check_pool(config.pool, where("pool"))
        if config.hub is not None:
            check_endpoint(config.hub.endpoint, f"{where('hub')}: hub.endpoint")
        return config


ROOT = Path("/")
UNLIMITED_V1 = 1 << 60
"""cgroup v1 says "no limit" as the largest multiple of a page below 2**63."""


def memory_limit(root: Path = ROOT) -> tuple[int, str] | None:
    """The smallest limit in bytes that holds for this process, and its source in words; None: none can be read. A container sees its own
    group as the root of what is mounted. `root`: where `proc` and `sys` are, for tests."""
    limits = []
    for path in ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = _read(root / path).strip()
        if text.isdigit() and int(text) < UNLIMITED_V1:
            limits.append((int(text), f"{path.rpartition('/')[2]} of its cgroup"))
    if (found := re.search(r"^MemTotal:\s*(\d+)", _read(root / "proc/meminfo"), re.MULTILINE)) is not None:
        limits.append((int(found[1]) * 1024, "the machine's memory"))
    return min(limits, default=None)


def check_fits(num_bytes: int, key: str, value: int, root: Path = ROOT) -> None:
    """Raise `ConfigurationError` if this machine cannot have what this vLLM's ranks there take together, as this configuration key says."""
    limit, source = memory_limit(root) or (num_bytes, "")
    if num_bytes > limit:
        raise ConfigurationError(
            f"{EXTRA}: {key} is {value}, which takes {num_bytes} bytes ({shown_size(num_bytes)}) on this machine; it must stay below "
            f"{limit} bytes ({shown_size(limit)}, {source}) with room for vLLM; lower {key}, or raise that limit"
        )


def shown_size(num_bytes: int) -> str:
    """The number as people read it."""
    return f"{num_bytes / (1 << 30):.1f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes / (1 << 20):.4g} MiB"


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeError):
        return ""
