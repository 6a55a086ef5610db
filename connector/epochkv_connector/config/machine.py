"""What this machine can give: memory for L1, and the devices that `distributed.protocol` asks for.

A host region is touched as a whole when it is mapped. If it exceeded the container's limit, the kernel would end the engine
without a word, so it is an error at start. Sources: cgroup v2 `memory.max` and v1 `memory.limit_in_bytes` of this process's group
and of every visible group above it, and the machine's physical memory. Only the loaded model tells how large a block is; a size
that suits no model is refused before one is loaded.

Mooncake falls back to TCP where it finds no RDMA device and mentions that only in its log: a user who asked for RDMA would
measure TCP. Source: the kernel lists devices in `/sys/class/infiniband`, where libibverbs looks for them, too.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from epochkv_connector.config.connector_config import EXTRA, ConfigError, ConnectorConfig
from epochkv_connector.worker.copying.slots import slot_stride

ROOT = Path("/")
DEVICES = "sys/class/infiniband"
UNLIMITED_V1 = 1 << 60
"""cgroup v1 says "no limit" as the largest multiple of a page below 2**63."""
SMALLEST_SLOT_BYTES = slot_stride([1])
"""A block of any model takes at least this."""
CROWDED_FRACTION = 0.8
"""Of the limit: an engine has weights, or copies of them while it loads, and some GB of its own besides L1."""


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


def crowded(num_bytes: int, root: Path = ROOT) -> Limit | None:
    """The limit that `num_bytes` of host memory nearly use up; None: there is room, or no limit is known."""
    limit = memory_limit(root)
    return limit if limit is not None and num_bytes > CROWDED_FRACTION * limit.num_bytes else None


def check_holds_something(config: ConnectorConfig) -> None:
    """Raise `ConfigError` if no block of any model fits into L1: the number was probably not meant as bytes."""
    if config.local is not None and config.local.capacity_bytes < SMALLEST_SLOT_BYTES:
        num_bytes = config.local.capacity_bytes
        raise ConfigError(
            f"{EXTRA}: local.capacity_bytes is {num_bytes}; it must be at least {SMALLEST_SLOT_BYTES}, as no block takes less; "
            f"{num_bytes} GiB would be {num_bytes << 30}; or leave local out for no L1"
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
