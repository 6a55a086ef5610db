"""The hub as each pool's engines reach it: dialled from here with the key and the address that they have."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final

from epochkv_fence.connection import (
    CLIENT_PUBLIC_ENV,
    CLIENT_SECRET_ENV,
    HUB_PUBLIC_ENV,
    ConfigurationError,
    Connection,
    HubRef,
    PoolRef,
    check_endpoint,
)
from epochkv_fence.doctor import judging
from epochkv_fence.doctor.finding import CannotLook, Finding, Level, Say
from epochkv_fence.doctor.looking import HubLook, NoHub, is_inside, look_at_hub
from epochkv_fence.doctor.running import Shared
from epochkv_operator.doctor.cluster import Cluster, gathered, place
from epochkv_operator.doctor.secrets import content_of, remade
from epochkv_operator.kube.client import Json
from epochkv_operator.planning.names import component_name

AT_ONCE: Final = 16
SECONDS: Final = 30.0
FORWARD: Final = "kubectl -n {home} port-forward service/epochkv-hub 7700 & sleep 2; epochkv doctor --hub tcp://127.0.0.1:7700"


class Hubs:
    """Looks at the hub of each pool, once for all checks."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._shared = Shared()
        self._gate = asyncio.Semaphore(AT_ONCE)

    async def look(self, pool: Json) -> HubLook | NoHub:
        return await self._shared.get(pool["metadata"]["uid"], lambda: self._look(pool))

    async def reached(self, pool: Json) -> HubLook:
        found = await self.look(pool)
        if isinstance(found, NoHub):
            raise CannotLook("the hub was not reached")
        return found

    async def _look(self, pool: Json) -> HubLook | NoHub:
        metadata = pool["metadata"]
        told = ((pool.get("status") or {}).get("endpoints") or {}).get("hub")
        endpoint = self._cluster.scope.hub or told
        if not endpoint:
            raise CannotLook("status.endpoints.hub is empty: no operator has looked at this pool")
        secret = await self._cluster.secret(metadata["namespace"], component_name(metadata["name"], "fence"))
        if secret is None:
            raise CannotLook("its Secret is not there, so there is no key to dial with")
        connection = connection_of(pool, endpoint, content_of(secret))
        async with self._gate:
            found = await look_at_hub(connection)
        if isinstance(found, NoHub) and found.dialled == "unresolved" and is_inside(endpoint.removeprefix("tcp://").rpartition(":")[0]):
            home = endpoint.removeprefix("tcp://").split(":")[0].split(".")[1]
            raise CannotLook(f"{endpoint} is an address inside of the cluster, and this is not", FORWARD.format(home=home))
        return found

    def checked(self, check: str, judge: Callable[[Json, HubLook], list[Finding]], many: str) -> Callable[[], Awaitable[list[Finding]]]:
        """A check of every pool whose hub answers."""

        async def look(pool: Json) -> list[Finding]:
            return judge(pool, await self.reached(pool))

        return self._each(check, look, many)

    def reachable(self) -> Callable[[], Awaitable[list[Finding]]]:
        async def look(pool: Json) -> list[Finding]:
            return judge_hub(pool, await self.look(pool))

        return self._each("hub", look, "the hub answers {} pools")

    def _each(self, check: str, look: Callable[[Json], Awaitable[list[Finding]]], many: str) -> Callable[[], Awaitable[list[Finding]]]:
        async def guarded(pool: Json) -> list[Finding]:
            try:
                return await look(pool)
            except CannotLook as error:
                return [Say(check, place(pool)).unknown(str(error), error.fix)]

        async def all_pools() -> list[Finding]:
            found = await asyncio.gather(*(guarded(pool) for pool in await self._cluster.pools()))
            said = gathered(fold(finding for findings in found for finding in findings), check, many)
            return said or [Say(check).ok("there is no pool whose hub could say so")]

        return all_pools


def connection_of(pool: Json, endpoint: str, content: dict[str, str]) -> Connection:
    """What the pool's engines connect with.

    Raises:
        CannotLook: the keys or the address are none.
    """
    metadata = pool["metadata"]
    keys = {HUB_PUBLIC_ENV: "hub.pub", CLIENT_PUBLIC_ENV: "client.pub", CLIENT_SECRET_ENV: "client.key"}
    environ = {variable: content.get(field, "") for variable, field in keys.items()}
    connection = Connection(PoolRef(metadata["name"], metadata["uid"], metadata["namespace"]), HubRef(endpoint), place(pool), environ)
    try:
        check_endpoint(endpoint, "the hub's address")
        connection.client_keys()
    except ConfigurationError as error:
        raise CannotLook("the keys of its Secret cannot be used (see secrets)" if "KEY" in str(error) else str(error)) from error
    return connection


def judge_hub(pool: Json, look: HubLook | NoHub) -> list[Finding]:
    """Whether the hub answers with this pool's key, and what to do when it does not."""
    say = Say("hub", place(pool))
    if isinstance(look, HubLook):
        return [say.ok(f"{look.endpoint} answers in {1000 * look.round_trip_seconds:.1f} ms")]
    operator = "kubectl get pods -A -l app.kubernetes.io/part-of=epochkv,app.kubernetes.io/component=operator"
    if look.trouble in ("key", "pool"):
        return [say.wrong(look.text, remade(pool))]
    if look.dialled == "silent":
        return [say.wrong(look.text, "kubectl get networkpolicies -A   # which one closes the hub's port? a firewall on the way?")]
    return [say.wrong(look.text, f"{operator}   # does one lead, and does it hang? see also lease and secrets")]


def judge_engines(pool: Json, look: HubLook) -> list[Finding]:
    """Engines that stall or are doubled; a pool without engines is told elsewhere."""
    namespace = pool["metadata"]["namespace"]

    def restart(name: str, pod: str) -> str:
        return f"kubectl -n {namespace} delete pod {pod}" if pod else f"end the process of engine {name}, and start it again"

    if not look.second.engines:
        return []
    return judging.judge_engines(look, judging.Words("", restart), place(pool))


def fold(found: Iterable[Finding]) -> list[Finding]:
    """Several pools that cannot be looked at for one reason become one line."""
    findings = list(found)
    unknown = [finding for finding in findings if finding.level is Level.UNKNOWN]
    rest = [finding for finding in findings if finding.level is not Level.UNKNOWN]
    by_reason: dict[tuple[str, str], list[Finding]] = {}
    for finding in unknown:
        by_reason.setdefault((finding.text, finding.fix), []).append(finding)
    return [*rest, *(_folded(same) for same in by_reason.values())]


def _folded(same: Sequence[Finding]) -> Finding:
    first = same[0]
    if len(same) == 1:
        return first
    return Finding(first.check, first.level, first.text, first.fix, f"{first.about} and {len(same) - 1} more")
