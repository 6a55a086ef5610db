"""Looks at a Mooncake store: whether its master takes connections, and what its admin port says. Nothing is changed there."""

from __future__ import annotations

import asyncio
import http.client
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final
from urllib.parse import urlsplit

from epochkv_fence.common import on_daemon_thread
from epochkv_fence.doctor.finding import Finding, Say
from epochkv_fence.doctor.looking import dial, is_inside

ADMIN_SECONDS: Final = 3.0
MAX_ANSWER_BYTES: Final = 1 << 20
STANDBY: Final = "service plane is not active"
METRIC: Final = r"^{}(?:\{{[^}}]*\}})?\s+([0-9.eE+-]+)\s*$"
ETCD: Final = "etcd://"
INSIDE: Final = "kubectl -n NAMESPACE get kvp   # MasterAvailable; or run `epochkv doctor` without --config"
MOUNT: Final = "python -m mooncake.mooncake_store_service   # MOONCAKE_MASTER={}"


@dataclass(frozen=True, slots=True)
class AdminLook:
    """What a master's admin port says. `problem` is empty when it serves."""

    url: str
    problem: str = ""
    standby: bool = False
    allocated_bytes: float | None = None
    capacity_bytes: float | None = None


async def look_at_master(address: str) -> list[Finding]:
    """Whether the master of a connection file takes connections."""
    say = Say("store", f"master {address}")
    if address.startswith(ETCD):
        return [say.ok("its masters are found through etcd, and are not dialled from here")]
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return [say.wrong(f"{address!r} is no host:port", "correct distributed.master_address in the connection file")]
    dialled, why = await dial(host, int(port))
    if dialled == "open":
        return [say.ok(why)]
    if dialled == "unresolved" and is_inside(host):
        return [say.unknown(f"{host} is an address inside of a cluster, and this machine does not know it", INSIDE)]
    return [say.wrong(f"{why}; engines serve without L2 meanwhile", f"mooncake_master --rpc_port={port}   # on {host}")]


async def look_at_admins(urls: Sequence[str]) -> list[Finding]:
    """What the admin ports of a store's masters say."""
    looks = await asyncio.gather(*(asyncio.wrap_future(on_daemon_thread(partial(_admin, url), "epochkv-admin")) for url in urls))
    return judge_admins(looks)


def judge_admins(looks: Sequence[AdminLook]) -> list[Finding]:
    """One of several masters serves, the others stand by."""
    found = []
    serving = [look for look in looks if not look.problem and not look.standby]
    for look in looks:
        say = Say("store", f"admin {look.url}")
        if look.problem:
            found.append(say.wrong(look.problem, f"curl -s {look.url}/health"))
        elif look.standby:
            alone = say.wrong("it stands by, and no master serves", f"curl -s {look.url}/health")
            found.append(say.ok("it stands by") if serving else alone)
        elif look.capacity_bytes == 0:
            found.append(say.wrong("no store is mounted, so nothing can be saved to L2", MOUNT.format("HOST:50051")))
        else:
            found.append(say.ok(f"it serves{_room(look)}"))
    return found


def _room(look: AdminLook) -> str:
    if look.allocated_bytes is None or not look.capacity_bytes:
        return ""
    return f"; {look.allocated_bytes / 2**30:.1f} of {look.capacity_bytes / 2**30:.1f} GiB are used"


def _admin(url: str) -> AdminLook:
    try:
        status, text = _get(url, "/health")
        if status == 503 and STANDBY in text:
            return AdminLook(url, standby=True)
        if status != 200:
            return AdminLook(url, f"/health answers with HTTP {status}: {text[:100]!r}")
        metrics = _get(url, "/metrics")[1]
    except (OSError, http.client.HTTPException, ValueError) as error:
        return AdminLook(url, f"the master's admin port does not answer ({error or type(error).__name__})")
    return AdminLook(url, "", False, _metric(metrics, "master_allocated_bytes"), _metric(metrics, "master_total_capacity_bytes"))


def _get(url: str, path: str) -> tuple[int, str]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=ADMIN_SECONDS)
    try:
        connection.request("GET", path, headers={"Connection": "close"})
        answer = connection.getresponse()
        return answer.status, answer.read(MAX_ANSWER_BYTES).decode(errors="replace")
    finally:
        connection.close()


def _metric(text: str, name: str) -> float | None:
    match = re.search(METRIC.format(name), text, re.MULTILINE)
    return float(match[1]) if match is not None else None
