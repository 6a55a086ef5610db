"""Whether this machine can do what `distributed.protocol` asks for.

Mooncake falls back to TCP where it finds no RDMA device and mentions that only in its log: a user who asked for RDMA would
measure TCP. Source: the kernel lists devices in `/sys/class/infiniband`, where libibverbs looks for them, too.
"""

from __future__ import annotations

from pathlib import Path

from epochkv_connector.config.keys import EXTRA, ConfigError, ConnectorConfig

ROOT = Path("/")
DEVICES = "sys/class/infiniband"


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
