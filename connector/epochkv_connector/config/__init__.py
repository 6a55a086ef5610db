"""The connector's configuration: parsed once at the edge; every error names the key, the value and what is allowed.

The keys come from `kv_connector_extra_config`. `config_file` or the environment variable `EPOCHKV_CONFIG` may name a JSON file
with the same keys, and the variable may hold the JSON itself; inline keys win. So an engine that a trainer starts can join
with a file, or its environment, alone. Clients use the same `pool` and `hub` (`epochkv_fence.connection`).

A field declares its key once (`msgspec.Meta`): type, bounds, description, and in `extra` what msgspec has no term for:

- `allowed`: of a text, what follows "it must be"; `fits`: whether a text is fine
- `remedy`: what to do, or what leaving an object out means; `unit`: of a number

From that come the sentences for a wrong key (msgspec says "Expected `int`, got `str` - at `$.local`", which does not tell what to
write instead) and the reference page (`reference`). Last, what this machine can give: memory for L1, and RDMA devices. Needs
neither vLLM nor torch.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, inspect

from epochkv_fence.connection import (
    CONFIG_ENV,
    ConfigurationError,
    HubRef,
    PoolRef,
    check_pool,
    read_document,
)

MAX_SHOWN = 80
HOST_PORT = re.compile(r"(?:\[[0-9A-Fa-f:.%]+\]|[^\s\[\]/@;,]+):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class Key:
    """What one key may hold.

    Attributes:
        kind: in words, with the unit of a number.
        allowed: follows "it must be" in a sentence.
        fits: whether a value is fine; of an object, whether it is one.
        remedy: what to do; empty: nothing beyond what `allowed` says.
        required: may neither be absent nor null.
        default: None where there is none.
        does: what the key is for, in Markdown.
        keys: of an object.
    """

    kind: str
    allowed: str
    fits: Callable[[Any], bool]
    remedy: str
    required: bool
    default: Any
    does: str
    keys: Mapping[str, Key] | None = None


def keys_of(model: type[msgspec.Struct]) -> dict[str, Key]:
    """The keys of a model, in its order."""
    found = inspect.type_info(model)
    assert isinstance(found, inspect.StructType)
    return _keys_of(found)


def _keys_of(model: inspect.StructType) -> dict[str, Key]:
    return {field.name: _key(field) for field in model.fields}


def _key(field: inspect.Field) -> Key:
    meta = field.type
    assert isinstance(meta, inspect.Metadata), f"{field.name} has no description"
    words, inner = meta.extra or {}, meta.type
    kinds = inner.types if isinstance(inner, inspect.UnionType) else (inner,)
    one = next(kind for kind in kinds if not isinstance(kind, inspect.NoneType))
    kind, allowed, fits = _allowed(one, words)
    nullable = len(kinds) > 1 and not isinstance(one, inspect.StructType)
    return Key(
        kind=", ".join(filter(None, (kind, words.get("unit")))),
        allowed=allowed,
        fits=(lambda value: value is None or fits(value)) if nullable else fits,
        remedy=words.get("remedy", ""),
        required=field.required,
        default=None if field.required else field.default,
        does=(meta.extra_json_schema or {})["description"],
        keys=_keys_of(one) if isinstance(one, inspect.StructType) else None,
    )


def _allowed(kind: inspect.Type, words: Mapping[str, Any]) -> tuple[str, str, Callable[[Any], bool]]:
    """The type's name, the values it may hold, and whether a value fits. `true` is not a number, and `1.0` is not a whole one."""
    match kind:
        case inspect.BoolType():
            return "boolean", "true or false", lambda value: isinstance(value, bool)
        case inspect.IntType():
            low, high = _bounds(kind)
            allowed = f"a whole number of {words['unit']} from {low} to {high}"
            return "integer", allowed, lambda value: type(value) is int and low <= value <= high
        case inspect.FloatType():
            low, high = _bounds(kind)
            bounds = f"from {low:g} to {high:g}" if kind.gt is None else f"above {kind.gt:g}, at most {high:g}"
            return "number", f"a number of {words['unit']} {bounds}", lambda value: type(value) in (int, float) and low <= value <= high
        case inspect.LiteralType(values=values):
            return "string", " or ".join(f'"{word}"' for word in values), lambda value: isinstance(value, str) and value in values
        case inspect.StructType() | inspect.DictType():
            allowed = words["allowed"] if isinstance(kind, inspect.DictType) else f"an object with the keys {_names(kind)}"
            return "object", allowed, lambda value: isinstance(value, Mapping)
    fits = words.get("fits", lambda value: True)
    return "string", words["allowed"], lambda value: isinstance(value, str) and fits(value)


def _names(model: inspect.StructType) -> str:
    return ", ".join(field.name for field in model.fields)


def _bounds(kind: inspect.IntType | inspect.FloatType) -> tuple[float, float]:
    """The least and the largest value."""
    least = math.nextafter(kind.gt, math.inf) if kind.gt is not None else kind.ge
    assert least is not None, "a number without a least value"
    assert kind.le is not None, "a number without a largest value"
    return least, kind.le


def is_host_port(value: str) -> bool:
    """`host:port` or `[IPv6]:port`, with a port that exists."""
    match = HOST_PORT.fullmatch(value)
    return match is not None and 0 < int(match["port"]) < 65536


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


def first_problem(document: Mapping[str, Any], keys: Mapping[str, Key]) -> tuple[str, str] | None:
    """The first thing that is wrong: the top-level key it is under, and a sentence. None: nothing."""
    return next(_problems(document, keys, "", ""), None)


def _problems(document: Mapping[str, Any], keys: Mapping[str, Key], path: str, remedy: str) -> Iterator[tuple[str, str]]:
    for name, value in document.items():
        if name not in keys:
            yield _top(path, str(name)), _unknown(str(name), value, keys, path)
    for name, key in keys.items():
        value = document.get(name)
        if name in document and key.keys is not None and isinstance(value, Mapping):
            yield from _problems(value, key.keys, f"{path}{name}.", key.remedy)
        elif (said := _wrong(name in document, value, key, remedy)) is not None:
            yield _top(path, name), f"{path}{name} {said}"


def _wrong(given: bool, value: Any, key: Key, remedy: str) -> str | None:
    """What is wrong with one value. `remedy`: of the object that the key is in."""
    if value is None and key.required:
        return _sentence("null" if given else "missing", key.allowed, key.remedy or remedy)
    if not given or (value is None and key.keys is not None) or key.fits(value):
        return None
    if value is None:
        return _sentence("null", key.allowed, key.remedy or "leave the key out for its default")
    return _sentence(shown(value), key.allowed, key.remedy)


def _top(path: str, key: str) -> str:
    return path.split(".", 1)[0] if path else key


def _sentence(state: str, allowed: str, remedy: str) -> str:
    return f"is {state}; it must be {allowed}" + (f"; {remedy}" if remedy else "")


def _unknown(name: str, value: Any, keys: Mapping[str, Key], path: str) -> str:
    meant = "".join(f"did you mean {path}{near}? " for near in difflib.get_close_matches(name.lower(), list(keys), n=1))
    known = f"the keys{f' of {path[:-1]}' if path else ''} are: {', '.join(sorted(keys))}"
    return f"{shown(path + name)[1:-1]} is {shown(value)}, but there is no such key; {meant}{known}"


def every(keys: Mapping[str, Key], path: str = "") -> Iterator[tuple[str, Key]]:
    """All keys with their full names; an object comes before its keys."""
    for name, key in keys.items():
        yield f"{path}{name}", key
        if key.keys is not None:
            yield from every(key.keys, f"{path}{name}.")


NAME: Final = "EpochKVConnector"
"""What `kv_connector` is in vLLM's configuration."""
EXTRA: Final = "kv_connector_extra_config"
MIN_BYTES: Final = 512
"""Of L1: a block of any model takes at least this (`worker.layout.slot_stride`)."""
MAX_BYTES: Final = 1 << 50
MAX_COUNT: Final = 1 << 31


class ConfigError(ValueError):
    """The configuration cannot be used; the message names key, value and remedy."""


def _is_master(address: str) -> bool:
    scheme, _, endpoints = address.rpartition("://")
    return scheme in ("", "etcd") and all(is_host_port(part) for part in endpoints.split(";"))


def _is_word(value: str) -> bool:
    return value != "" and value.isprintable() and not any(map(str.isspace, value))


class LocalTier(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """L1."""

    capacity_bytes: Annotated[
        int,
        Meta(
            ge=MIN_BYTES,
            le=MAX_BYTES,
            description="Size of L1 of one engine, split evenly over its worker ranks; no rank takes more than its share. The rank whose "
            "blocks are largest decides how many blocks L1 holds. It must hold one block on each rank, and fit into the memory of this "
            "machine or container.",
            extra={"unit": "bytes", "remedy": "or leave local out for no L1"},
        ),
    ]


class DistributedTier(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """L2: a Mooncake store."""

    master_address: Annotated[
        str,
        Meta(
            description="The Mooncake master. While it does not answer, the engine serves without L2.",
            extra={
                "allowed": "host:port of the Mooncake master, or etcd://host:port;host:port of a replicated one",
                "fits": _is_master,
                "remedy": "or leave distributed out for no L2",
            },
        ),
    ]
    metadata_server: Annotated[
        str,
        Meta(
            description="How Mooncake's clients find each other. Stores and engines need the same value. `P2PHANDSHAKE` needs no server.",
            extra={"allowed": "P2PHANDSHAKE or the address of Mooncake's metadata server", "fits": _is_word},
        ),
    ] = "P2PHANDSHAKE"
    protocol: Annotated[Literal["tcp", "rdma"], Meta(description="How blocks travel. It must be the protocol of the stores.")] = "tcp"
    device_name: Annotated[
        str,
        Meta(
            description="RDMA devices of this machine, for `rdma`.",
            extra={"allowed": "names of RDMA devices with commas, or empty", "fits": str.isprintable},
        ),
    ] = ""


class ConnectorConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything the connector can be told. Absent tiers are off; without `hub` this engine is a pool of its own."""

    config_file: Annotated[
        str | None,
        Meta(
            description="A JSON file with the keys of this page, or the folder of a `connection.json`. Keys beside `config_file` win. "
            "Without it, the environment variable `EPOCHKV_CONFIG` names the file or holds the JSON itself.",
            extra={"allowed": "the path of a JSON file", "fits": lambda value: value.strip() != "", "remedy": "or leave it out"},
        ),
    ] = None
    pool: Annotated[
        PoolRef,
        Meta(
            description="The pool of this engine. Every pool's `connection.json` has it.",
            extra={"remedy": "every pool's connection.json has it"},
        ),
    ]
    hub: Annotated[
        HubRef | None,
        Meta(
            description="The pool's hub. Without it, this engine shares nothing.",
            extra={"remedy": "leave hub out for an engine that shares nothing"},
        ),
    ] = None
    local: Annotated[
        LocalTier | None,
        Meta(
            description="L1: host memory of this engine. Without it, the engine has no L1.", extra={"remedy": "leave local out for no L1"}
        ),
    ] = None
    distributed: Annotated[
        DistributedTier | None,
        Meta(
            description="L2: a Mooncake store that all engines of the pool share. Without it, the engine has no L2.",
            extra={"remedy": "leave distributed out for no L2"},
        ),
    ] = None
    lookup_wait_ms: Annotated[
        float,
        Meta(
            ge=0,
            le=60_000,
            description="How long one scheduler step waits for answers of L2, for all its requests together.",
            extra={"unit": "milliseconds"},
        ),
    ] = 1.0
    lookup_deadline_ms: Annotated[
        float,
        Meta(
            gt=0,
            le=600_000,
            description="How long L2 may take to answer for one request. After that, only the L1 answer counts.",
            extra={"unit": "milliseconds"},
        ),
    ] = 500.0
    min_load_tokens: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_COUNT,
            description="Ignore hits that add fewer tokens than this to the GPU hit.",
            extra={"unit": "tokens"},
        ),
    ] = 0
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
    allow_untested_vllm: Annotated[bool, Meta(description="Start with a version of vLLM that was not tested, at your own risk.")] = False

    @property
    def has_tiers(self) -> bool:
        """It names L1 or L2."""
        return self.local is not None or self.distributed is not None

    @classmethod
    def parse(cls, extra: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> ConnectorConfig:
        """Build from `kv_connector_extra_config`.

        Raises:
            ConfigError: unknown key, wrong type, impossible value or unreadable file.
        """
        inline = dict(extra)
        variables = os.environ if environ is None else environ
        document, origin = _document(inline.pop("config_file", None), variables)
        merged = {**document, **inline}
        found = first_problem(merged, KEYS)
        if found is not None:
            key, sentence = found
            raise ConfigError(f"{EXTRA if key in inline or key not in document else origin}: {sentence}")
        config = msgspec.convert(merged, cls)
        try:
            check_pool(config.pool, EXTRA)
        except ConfigurationError as error:
            raise ConfigError(str(error)) from None
        return config


def _document(source: object, variables: Mapping[str, str]) -> tuple[dict[str, Any], str]:
    """What the file or the environment gives, and its name in errors."""
    wrong = first_problem({"config_file": source}, {"config_file": KEYS["config_file"]})
    if wrong is not None:
        raise ConfigError(f"{EXTRA}: {wrong[1]}")
    named = f"{EXTRA}: config_file" if source is not None else CONFIG_ENV
    given = source if source is not None else variables.get(CONFIG_ENV, "").removeprefix("\ufeff").strip() or None
    if given is None:
        return {}, EXTRA
    assert isinstance(given, str)
    try:
        document = read_document(given, variables)
    except ConfigurationError as error:
        words = str(error).removeprefix("the connection configuration").removeprefix(CONFIG_ENV).lstrip(": ")
        raise ConfigError(f"{named}: {shown(given) + ' ' if words.startswith('is ') else ''}{words}") from None
    origin = named if given.lstrip().startswith("{") else document.origin
    if "config_file" in document.content:
        value = shown(document.content["config_file"])
        raise ConfigError(f"{origin}: config_file is {value}; it must be in {EXTRA}, as a file cannot name another; leave it out")
    return document.content, origin


KEYS: Final = keys_of(ConnectorConfig)


MODULE: Final = "epochkv_connector.connector"
MOONCAKE: Final = "MooncakeStoreConnector"
"""vLLM's own connector to a Mooncake store."""
MOONCAKE_ENV: Final = "MOONCAKE_CONFIG_PATH"
"""Where it looks for its file."""
MOONCAKE_KEY: Final = "mooncake_config_path"
"""Where its users name that file: our plugin hands it on."""


def transfer_config(extra: Mapping[str, Any], role: str = "kv_both") -> dict[str, Any]:
    """What vLLM's `--kv-transfer-config` takes, around the connector's own configuration."""
    return {
        "kv_connector": NAME,
        "kv_connector_module_path": MODULE,
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        EXTRA: dict(extra),
    }


ROOT = Path("/")
DEVICES = "sys/class/infiniband"
UNLIMITED_V1 = 1 << 60
"""cgroup v1 says "no limit" as the largest multiple of a page below 2**63."""


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit in bytes, and its source in words."""

    num_bytes: int
    source: str


def memory_limit(root: Path = ROOT) -> Limit | None:
    """The smallest limit that holds for this process; None: none can be read.

    Args:
        root: for tests: where `proc` and `sys` are.
    """
    limits = [limit for limit in (*_cgroup_limits(root), _physical(root)) if limit is not None]
    return min(limits, key=lambda limit: limit.num_bytes, default=None)


def check_fits(num_bytes: int, key: str, value: int, root: Path = ROOT) -> None:
    """Raise `ConfigError` if `num_bytes` of host memory cannot be had on this machine.

    Args:
        num_bytes: what the ranks on this machine will take together.
        key, value: the configuration key it comes from.
    """
    limit = memory_limit(root)
    if limit is not None and num_bytes > limit.num_bytes:
        raise ConfigError(
            f"{EXTRA}: {key} is {value}, which takes {num_bytes} bytes ({gib(num_bytes)}) on this machine; it must stay below "
            f"{limit.num_bytes} bytes ({gib(limit.num_bytes)}, {limit.source}) with room for vLLM; lower {key}, or raise that limit"
        )


def check_devices(config: ConnectorConfig, root: Path = ROOT) -> None:
    """Raise `ConfigError` for RDMA without a device, or with one that this machine does not have.

    Args:
        root: for tests: where `sys` is.
    """
    store = config.distributed
    if store is None or store.protocol != "rdma":
        return
    folder = root / DEVICES
    try:
        there = sorted(path.name for path in folder.iterdir())
    except OSError:
        there = []
    if not there:
        raise ConfigError(
            f'{EXTRA}: distributed.protocol is "rdma"; it must be "tcp" on this machine, which has no RDMA device (/{DEVICES} is '
            "empty); use tcp here and for the stores, or give the container its devices"
        )
    unknown = [name for name in filter(None, (part.strip() for part in store.device_name.split(","))) if name not in there]
    if unknown:
        raise ConfigError(
            f"{EXTRA}: distributed.device_name is {store.device_name!r}; this machine has no {', '.join(unknown)}; "
            f"it must be of: {', '.join(there)}"
        )


def gib(num_bytes: int) -> str:
    """The number as people read it."""
    return f"{num_bytes / (1 << 30):.1f} GiB"


def _physical(root: Path) -> Limit | None:
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if name == "MemTotal" and words and words[0].isdigit():
            return Limit(int(words[0]) * 1024, "the machine's memory")
    return None


def _cgroup_limits(root: Path) -> list[Limit | None]:
    found: list[Limit | None] = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controllers == "":
            found += _up(root / "sys/fs/cgroup", group, "memory.max")
        elif "memory" in controllers.split(","):
            found += _up(root / "sys/fs/cgroup/memory", group, "memory.limit_in_bytes")
    return found


def _up(mount: Path, group: str, name: str) -> list[Limit | None]:
    """The limits of a group and of all above it. A container sees its own group as the mount's root, whatever `group` says."""
    folder = Path(os.path.normpath(str(mount) + "/" + group))
    folders = [folder, *folder.parents] if folder.is_relative_to(mount) else [mount]
    return [_limit(place / name) for place in folders if place.is_relative_to(mount)]


def _limit(path: Path) -> Limit | None:
    text = _read(path).strip()
    if not text.isdigit() or int(text) >= UNLIMITED_V1:
        return None
    return Limit(int(text), f"{path.name} of its cgroup")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeError):
        return ""
