"""The masters of pools whose Mooncake the operator runs: where they answer, and whether one of them leads.

Kubernetes knows their processes alone. A master that never reaches etcd is alive and ready, and serves nobody; it says so to who asks.
"""

import asyncio
import ipaddress
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import aiohttp

from epochkv_fence.common import bracketed
from epochkv_operator.api.base import POOL_LABEL
from epochkv_operator.api.resources import PODS, POOLS
from epochkv_operator.kube.client import Json
from epochkv_operator.kube.store import Key, Store, key_of
from epochkv_operator.planning.names import MASTER_ADMIN_PORT, component_selector
from epochkv_operator.planning.workload import ended, is_ready

PERIOD_SECONDS: Final = 5.0
ROUNDS: Final = 2
"""None leads when so many rounds in a row say that: one that was just elected takes about five seconds to serve."""
ANSWER_SECONDS: Final = 2.0
AT_ONCE: Final = 32
MAX_ANSWER_BYTES: Final = 1 << 16


def master_urls(store: Store, pool_uid: str) -> list[str]:
    """Admin ports of the live masters, from what the watches show. Those that are ready come first: with several masters, the one that
    serves is among them. None for a pool that is gone, and for one whose Mooncake somebody else runs."""
    pool = store.by_uid(POOLS.kind, pool_uid)
    if pool is None:
        return []
    found = sorted(_masters(store, pool), key=lambda pod: (not is_ready(pod), str(pod["metadata"]["name"])))
    return [url for pod in found if (url := _url(pod))]


def _masters(store: Store, pool: Json) -> Iterator[Json]:
    """Their pods, but for those that are going or have ended."""
    if not ((pool["spec"].get("distributed") or {}).get("mooncake")):
        return
    namespace, name = pool["metadata"]["namespace"], pool["metadata"]["name"]
    wanted = component_selector(name, "master")
    for pod in store.found(PODS.kind, namespace, POOL_LABEL, name):
        if wanted.items() <= pod["metadata"]["labels"].items() and pod["metadata"].get("deletionTimestamp") is None and not ended(pod):
            yield pod


def _url(pod: Json) -> str:
    """Empty while the pod has no address."""
    try:
        address = ipaddress.ip_address((pod.get("status") or {}).get("podIP") or "")
    except ValueError:
        return ""
    return f"http://{bracketed(str(address))}:{MASTER_ADMIN_PORT}"


def _elects(pool: Json) -> bool:
    """Its masters have to find a leader among them."""
    mooncake = (pool["spec"].get("distributed") or {}).get("mooncake") or {}
    return bool(((mooncake.get("master") or {}).get("highAvailability") or {}).get("etcd"))


@dataclass(eq=False)
class Elections:
    """Asks the masters of each pool with etcd every few seconds. `changed` is called for a pool whose `leaderless` has changed."""

    _store: Store
    _changed: Callable[[Key], object]
    _rounds: dict[str, int] = field(default_factory=dict)
    _at_once: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))

    def leaderless(self, pool_uid: str) -> bool:
        """Every master that is ready says that it does not serve. One that cannot be asked from here may."""
        return self._rounds.get(pool_uid, 0) >= ROUNDS

    async def watch(self) -> None:
        """Never returns."""
        timeout, connector = aiohttp.ClientTimeout(total=ANSWER_SECONDS), aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector, auto_decompress=False) as session:
            while True:
                pools = {pool["metadata"]["uid"]: pool for pool in self._store.every(POOLS.kind) if _elects(pool)}
                none_leads = await asyncio.gather(*(self._none_leads(session, pool) for pool in pools.values()))
                before = {uid: self.leaderless(uid) for uid in pools}
                self._rounds = {uid: self._rounds.get(uid, 0) + 1 for uid, none in zip(pools, none_leads, strict=True) if none}
                for uid, pool in pools.items():
                    if before[uid] != self.leaderless(uid):
                        self._changed(key_of(POOLS.kind, pool))
                await asyncio.sleep(PERIOD_SECONDS)

    async def _none_leads(self, session: aiohttp.ClientSession, pool: Json) -> bool:
        ready = [pod for pod in _masters(self._store, pool) if is_ready(pod)]
        async with self._at_once:  # not the session's limit: its queue counts as the time of who waits
            said = await asyncio.gather(*(_serves(session, _url(pod)) for pod in ready))
        return bool(said) and all(answer is False for answer in said)


async def _serves(session: aiohttp.ClientSession, url: str) -> bool | None:
    """What a master says of itself; None when it does not."""
    try:
        async with session.get(f"{url}/health", allow_redirects=False) as answer:
            if (answer.content_length or MAX_ANSWER_BYTES) >= MAX_ANSWER_BYTES:
                return None  # no master's
            said = await answer.json(content_type=None)
    except (aiohttp.ClientError, OSError, ValueError, RecursionError):  # a time-out is an OSError
        return None
    return said.get("service_ready") if isinstance(said, dict) else None
