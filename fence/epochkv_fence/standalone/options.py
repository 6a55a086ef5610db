"""What `epochkv hub` is told, checked before anything is made; and the addresses in it."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from epochkv_fence.connection import ConfigurationError, check_endpoint
from epochkv_fence.protocol.pool import PoolConfig, ReclaimPolicy
from epochkv_fence.stores.mooncake import check_admin_url

MAX_NAME: Final = 253
NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
"""A DNS-1123 subdomain, as the name of a KVCachePool: a pool keeps its name when it moves to Kubernetes, or from there."""


class HubError(Exception):
    """The hub cannot be started as asked; the message names the option and the remedy."""


@dataclass(frozen=True, slots=True)
class HubOptions:
    """What `epochkv hub` is told.

    Attributes:
        listen: `tcp://HOST:PORT`; `*` or `0.0.0.0` for every address, port 0 for a free one.
        state: directory of the record and the keys.
        advertise: what engines and trainers dial; empty: derived from `listen`.
        store_admin: admin URLs of the store's masters; empty: none.
        metrics: `HOST:PORT` of /metrics and /healthz; empty: none.
    """

    pool: str
    listen: str
    state: Path
    lease_seconds: float = 30.0
    reclaim: ReclaimPolicy = "Delete"
    store_admin: tuple[str, ...] = ()
    advertise: str = ""
    metrics: str = ""

    def checked(self) -> HubOptions:
        """With addresses in their usual form.

        Raises:
            HubError: an option cannot be meant.
        """
        if len(self.pool) > MAX_NAME or NAME.fullmatch(self.pool) is None:
            raise HubError(
                f"--pool is {self.pool!r}; give a name as Kubernetes has them: at most {MAX_NAME} characters, lower-case letters, digits, "
                "- and ., each part between dots beginning and ending with a letter or digit, such as policy"
            )
        split_listen(self.listen)
        try:
            if self.advertise:
                check_endpoint(self.advertise, "--advertise")
            urls = tuple(check_admin_url(url) for url in self.store_admin)
        except (ConfigurationError, ValueError) as error:
            raise HubError(str(error)) from error
        if self.reclaim == "RemoveAll" and not urls:
            raise HubError("--reclaim RemoveAll needs --store-admin: the hub itself empties the store, which only this pool may use")
        if self.metrics:
            split_address(self.metrics)
        return replace(self, store_admin=urls)

    def pool_config(self, uid: str, client_public_keys: tuple[str, ...]) -> PoolConfig:
        """The pool that the hub serves.

        Raises:
            HubError: an option cannot be meant.
        """
        try:
            return PoolConfig(
                uid,
                self.pool,
                client_public_keys,
                lease_seconds=self.lease_seconds,
                reclaim=self.reclaim,
                store_admin=bool(self.store_admin),
            )
        except ValueError as error:
            raise HubError(str(error)) from error


def split_listen(listen: str) -> tuple[str, int]:
    """Host and port of `tcp://HOST:PORT`; `HubError` for anything else."""
    scheme, _, address = listen.partition("://")
    if scheme != "tcp" or not address:
        raise HubError(f"--listen is {listen!r}; it must look like tcp://0.0.0.0:7700")
    try:
        return split_address(address)
    except HubError as error:
        if _bare_ipv6(address):
            raise HubError(f"--listen is {listen!r}; an IPv6 address needs brackets, such as tcp://[::]:7700") from error
        raise HubError(f"--listen is {listen!r}; it must look like tcp://0.0.0.0:7700") from error


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`; `HubError` for anything else."""
    host, _, port = address.rpartition(":")
    if _bare_ipv6(address):
        raise HubError(f"{address!r} is no address; an IPv6 address needs brackets, such as [::]:9090")
    if not host or not port.isascii() or not port.isdecimal() or not 0 <= int(port) < 65536 or not host.isprintable() or " " in host:
        raise HubError(f"{address!r} is no address; it must look like 0.0.0.0:9090")
    return host, int(port)


def _bare_ipv6(address: str) -> bool:
    """An IPv6 address without brackets, with a port or without one."""
    for text in (address, address.rpartition(":")[0]):
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(text).version == 6
    return False


def advertised(bound: str, listen: str) -> str:
    """What clients dial when nobody says: the address that was bound, or this machine's name if that was every address."""
    port = bound.rpartition(":")[2]
    host, _ = split_listen(listen)
    if host not in ("*", "0.0.0.0", "[::]"):
        return f"tcp://{host}:{port}"
    name = socket.gethostname()
    with contextlib.suppress(OSError):
        socket.getaddrinfo(name, None)
        return f"tcp://{name}:{port}"
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing; the kernel chooses our address
        return f"tcp://{probe.getsockname()[0]}:{port}"
    return f"tcp://127.0.0.1:{port}"
