"""TCP ports of this machine's loopback addresses."""

from __future__ import annotations

import random
import socket
from collections import deque

MAX_CLAIMS = 100
_claims: deque[socket.socket] = deque()
"""Names that no other process of this machine can take: two that pick a port at one moment would both find it free."""


def free_ports(count: int) -> list[int]:
    """Ports that are free now, below the ephemeral range so that no outgoing connection takes them later.

    Raises:
        OSError: there are not so many.
    """
    found: list[int] = []
    for port in random.SystemRandom().sample(range(20000, 32000), 2000):
        claim = socket.socket(socket.AF_UNIX)
        with socket.socket() as probe:
            try:
                claim.bind(f"\0epochkv-port-{port}")
                probe.bind(("127.0.0.1", port))
            except OSError:
                claim.close()
                continue
        _claims.append(claim)
        if len(_claims) > MAX_CLAIMS:
            _claims.popleft().close()
        found.append(port)
        if len(found) == count:
            return found
    raise OSError("no free loopback port between 20000 and 32000: end what listens there")


def free_port() -> int:
    """One of them."""
    return free_ports(1)[0]


def port_open(port: int, host: str = "127.0.0.1") -> bool:
    """Does something accept connections there?"""
    try:
        with socket.create_connection((host, port), timeout=0.5):
            return True
    except OSError:
        return False


def has_ipv6() -> bool:
    """Whether `::1` is an address of this machine."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True
