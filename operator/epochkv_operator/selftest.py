"""`epochkv-operator selftest`: reset a pool through the API server, and see it published there and at the hub.

What `helm test` runs. It goes the whole way of a reset: admission, the operator, its status, the pool's keys, the hub's Service.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from epochkv_fence.client.async_pool import AsyncPool
from epochkv_fence.client.errors import PoolError
from epochkv_fence.connection import (
    CLIENT_PUBLIC_ENV,
    CLIENT_SECRET_ENV,
    HUB_PUBLIC_ENV,
    ConfigurationError,
    Connection,
)
from epochkv_operator.kube.client import MERGE_PATCH, AlreadyExists, ApiError, Json, KubeClient, NotFound
from epochkv_operator.kube.resources import POOLS, SECRETS

Say = Callable[[str], None]

TEMPORARY_POOL = "epochkv-test"
TEMPORARY_LABEL = "epochkv.io/temporary"
_LOOK_SECONDS = 0.2
_KEYS = {HUB_PUBLIC_ENV: "hub.pub", CLIENT_PUBLIC_ENV: "client.pub", CLIENT_SECRET_ENV: "client.key"}


class SelftestFailed(Exception):
    """What did not happen, with what is known about why."""


@dataclass(frozen=True)
class Selftest:
    """One run. `pool` None: a pool of its own, of the name `epochkv-test`, deleted afterwards."""

    client: KubeClient
    namespace: str
    pool: str | None
    timeout_seconds: float
    say: Say

    @property
    def name(self) -> str:
        return self.pool or TEMPORARY_POOL

    @property
    def where(self) -> str:
        return f"KVCachePool {self.namespace}/{self.name}"

    async def run(self) -> None:
        """Raises `SelftestFailed`."""
        try:
            if self.pool is not None:
                await self._reset()
                return
            await self._create()
            try:
                await self._reset()
            finally:
                await self._delete()
        except ApiError as error:
            raise SelftestFailed(str(error)) from error

    async def _create(self) -> None:
        """A pool of our own; what an earlier run left behind goes first."""
        body = {
            "apiVersion": POOLS.api_version,
            "kind": POOLS.kind,
            "metadata": {"name": self.name, "labels": {TEMPORARY_LABEL: "selftest"}},
            "spec": {"local": {"capacity": "64Mi"}},
        }
        deadline = time.monotonic() + self.timeout_seconds
        while True:
            try:
                await self.client.create(POOLS, self.namespace, body)
            except AlreadyExists:
                await self._delete()
                if time.monotonic() > deadline:
                    raise SelftestFailed(f"{self.where} of an earlier run does not go") from None
                await asyncio.sleep(_LOOK_SECONDS)
            else:
                self.say(f"{self.where}: created")
                return

    async def _delete(self) -> None:
        try:
            found = await self.client.get(POOLS, self.namespace, self.name)
        except NotFound:
            return
        if (found["metadata"].get("labels") or {}).get(TEMPORARY_LABEL) != "selftest":
            raise SelftestFailed(f"{self.where} exists and is no temporary pool: rename it, or test it with --pool={self.name}")
        await self.client.delete(POOLS, self.namespace, self.name, found["metadata"]["uid"])

    async def _reset(self) -> None:
        pool = await self._wait(lambda pool: "epoch" in _status(pool) and "endpoints" in _status(pool), "no operator has looked at it")
        epoch = 1 + max(pool["spec"].get("resetEpoch") or 0, _status(pool).get("targetEpoch") or 0, _status(pool)["epoch"])
        started = time.monotonic()
        path = POOLS.path(self.namespace, self.name)
        await self.client.request("PATCH", path, body={"spec": {"resetEpoch": epoch}}, content_type=MERGE_PATCH)
        pool = await self._wait(lambda pool: (_status(pool).get("epoch") or 0) >= epoch, f"epoch {epoch} is not published")
        self.say(f"{self.where}: epoch {epoch} is published after {time.monotonic() - started:.2f} s")
        await self._ask_the_hub(pool, epoch)

    async def _wait(self, done: Callable[[Json], bool], failing: str) -> Json:
        deadline = time.monotonic() + self.timeout_seconds
        while True:
            try:
                pool = await self.client.get(POOLS, self.namespace, self.name)
            except NotFound as error:
                raise SelftestFailed(f"{self.where} is not there") from error
            if done(pool):
                return pool
            if time.monotonic() > deadline:
                raise SelftestFailed(f"{self.where}: {failing} after {self.timeout_seconds:g} s{_reasons(pool)}")
            await asyncio.sleep(_LOOK_SECONDS)

    async def _ask_the_hub(self, pool: Json, epoch: int) -> None:
        """Dial the hub as an engine does: its endpoint from the status, the keys from the pool's Secret."""
        endpoints = _status(pool)["endpoints"]
        secret = await self.client.get(SECRETS, self.namespace, endpoints["secret"])
        try:
            keys = {variable: base64.b64decode(secret["data"][key]).decode() for variable, key in _KEYS.items()}
        except (KeyError, ValueError) as error:
            raise SelftestFailed(f"Secret {self.namespace}/{endpoints['secret']} has no usable {error}") from error
        content = {"pool": {"name": self.name, "uid": pool["metadata"]["uid"]}, "hub": {"endpoint": endpoints["hub"]}}
        try:
            connection = Connection.load(content, environ=keys)
            client = await AsyncPool.connect(connection, timeout_s=self.timeout_seconds)
            try:
                status = await client.status(timeout_s=self.timeout_seconds)
            finally:
                await client.close()
        except (PoolError, ConfigurationError) as error:
            raise SelftestFailed(f"the hub at {endpoints['hub']} does not answer as it should: {error}") from error
        if status.published < epoch:
            raise SelftestFailed(
                f"the hub at {endpoints['hub']} has published epoch {status.published}, and the status of the pool says {epoch}"
            )
        self.say(f"hub {endpoints['hub']}: answers with the pool's keys, at epoch {status.published}")


def _status(pool: Json) -> dict[str, Any]:
    return pool.get("status") or {}


def _reasons(pool: Json) -> str:
    """Conditions that are not True, as `; Type: message`."""
    wrong = [item for item in _status(pool).get("conditions") or [] if item.get("status") != "True"]
    return "".join(f"; {item['type']}: {item.get('reason')}: {item.get('message')}" for item in wrong)


async def selftest(namespace: str, pool: str | None, timeout_seconds: float, say: Say) -> None:
    """Connect and run.

    Raises:
        SelftestFailed: something did not happen; the text says what.
        kubernetes.aio.config.ConfigException: there is no way to an API server.
    """
    client = await KubeClient.connect()
    try:
        await Selftest(client, namespace, pool, timeout_seconds, say).run()
    finally:
        await client.close()
