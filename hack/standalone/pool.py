"""A pool without Kubernetes for tests, benchmarks and the demo: what `epochkv hub` runs, in a thread of this process.

The real thing throughout: its record is a file, its keys and client folder are those that `epochkv hub` writes. Engines
join with the `--kv-transfer-config` that `connector()` returns, exactly as the operator would render it.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar

from epochkv_fence import launch
from epochkv_fence.mooncake_admin import StoreAdmin
from epochkv_fence.protocol.pool import PoolSnapshot
from epochkv_fence.standalone.hub import HubOptions, StandaloneHub
from hack.waiting import eventually

T = TypeVar("T")


def transfer_config(
    connection: Mapping[str, Any], local_bytes: int | None = None, master_address: str | None = None, **extra: Any
) -> dict[str, Any]:
    """`--kv-transfer-config` of an engine that joins with this connection; L1 and L2 as far as they are given."""
    config: dict[str, Any] = dict(connection)
    if local_bytes is not None:
        config["local"] = {"capacity_bytes": local_bytes}
    if master_address is not None:
        config["distributed"] = {"master_address": master_address}
    return launch.transfer_config({**config, **extra})


def read_connection(credentials: Path) -> dict[str, Any]:
    """What a client needs to know: the content of the `connection.json` in its folder."""
    content: dict[str, Any] = json.loads((credentials / "connection.json").read_text())
    return {"pool": content["pool"], "hub": {**content["hub"], "credentials_dir": str(credentials)}}


class Pool:
    """A pool whose hub runs in this process.

    Args:
        directory: gets the hub's state, with the client folder that engines read.
        name: of the pool.
        lease_seconds: as in the pool's spec.
        stores: reaches the pool's store, for `configure(store_admin=True)`.

    Attributes:
        uid, endpoint: of the pool and its hub, once started.
        credentials: the client folder.
    """

    def __init__(
        self,
        directory: Path,
        name: str = "policy",
        lease_seconds: float = 30.0,
        stores: StoreAdmin | None = None,
    ) -> None:
        self.name, self.uid, self.endpoint = name, "", ""
        self._state = directory / "fence"
        self.credentials = self._state / "client"
        self._options = HubOptions(name, "tcp://127.0.0.1:0", self._state, lease_seconds=lease_seconds)
        self._stores = stores
        self._changes: dict[str, Any] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="hub", daemon=True)
        self._hub: StandaloneHub | None = None

    def start_hub(self) -> None:
        """Start the hub (again, at the same address, as a new term)."""
        hub = StandaloneHub(self._options)
        if self._stores is not None:
            hub.stores = self._stores
        self._run(hub.start())
        self._hub, self.uid, self.endpoint = hub, hub.uid, hub.endpoint
        self._options = replace(self._options, listen=self.endpoint)
        if self._changes:
            self._call(lambda: hub.keys.configure(**self._changes))

    def stop_hub(self) -> None:
        """Stop it; engines keep what they were granted until their leases run out."""
        hub, self._hub = self._hub, None
        if hub is not None:
            self._run(hub.stop())

    def snapshot(self) -> PoolSnapshot:
        """The pool as the hub knows it now."""
        return self._call(lambda: self._running().server.snapshot(self.uid))

    def configure(self, **changes: Any) -> None:
        """Change fields of the pool's `PoolConfig` under the running hub, as an owner who edits the spec does."""
        self._changes.update(changes)
        self._call(lambda: self._running().keys.configure(**changes))

    def connection(self) -> dict[str, Any]:
        """What a client needs to know."""
        return read_connection(self.credentials)

    def wait_engines(self, num_engines: int, seconds: float = 60.0) -> None:
        """Return once that many engines share: at the target, and their weights known."""
        self._wait(
            lambda: sum(view.state == "sharing" for view in self.snapshot().engines) >= num_engines,
            seconds,
            f"{num_engines} engines in use of the epoch",
        )

    def bump(self, seconds: float = 60.0) -> int:
        """Raise the epoch by one and return it once it is published."""
        epoch = self.snapshot().target + 1
        self._call(lambda: self._running().server.request(self.uid, epoch))
        self._wait(lambda: self.snapshot().published >= epoch, seconds, f"epoch {epoch} published")
        return epoch

    def connector(self, local_bytes: int | None = None, master_address: str | None = None, **extra: Any) -> dict[str, Any]:
        """`--kv-transfer-config` of an engine of this pool; L1 and L2 as far as they are given."""
        return transfer_config(self.connection(), local_bytes, master_address, **extra)

    def _running(self) -> StandaloneHub:
        if self._hub is None:
            raise RuntimeError(f"the hub of pool {self.name} is stopped; call start_hub()")
        return self._hub

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30.0)

    def _call(self, work: Callable[[], T]) -> T:
        async def wrapper() -> T:
            return work()

        return self._run(wrapper())

    def _wait(self, ready: Callable[[], bool], seconds: float, what: str) -> None:
        eventually(ready, lambda: f"pool {self.name}: {what}; the hub knows {self.snapshot()}", seconds, 0.01)

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self.start_hub()
        except BaseException:  # no `__exit__` follows
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop_hub()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)
        self._loop.close()
