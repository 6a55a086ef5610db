"""A pool's hub without Kubernetes: the production `HubServer` in a thread, over an authority that lives as long as this process.

One holder, one term, a dictionary as record: enough where nothing has to survive this process. Engines join with the
`--kv-transfer-config` that `connector()` returns, exactly as the operator would render it.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

from epochkv_fence.authority import AuthorityError, Origin, PoolRecord, Term
from epochkv_fence.messages import Mode
from epochkv_fence.store_admin import StoreAdmin
from epochkv_fence.transport import HubKeys, HubServer, PoolConfig, PoolSnapshot, generate_keypair

T = TypeVar("T")


class SoloAuthority:
    """Linearizable because one event loop runs it; leadership never moves."""

    def __init__(self) -> None:
        self.term = Term("standalone", 1)
        self.record_of: dict[str, PoolRecord] = {}

    async def verify(self, term: Term) -> bool:
        return term == self.term

    async def load(self, pool_uid: str) -> PoolRecord:
        return self.record_of.get(pool_uid, PoolRecord())

    async def record(self, pool_uid: str, target: int, origin: Origin | None = None) -> None:
        old = await self.load(pool_uid)
        if target > old.target:
            self.record_of[pool_uid] = replace(old, target=target, origin=origin)

    async def publish(self, pool_uid: str, epoch: int) -> None:
        old = await self.load(pool_uid)
        if epoch > old.target:
            raise AuthorityError(f"epoch {epoch} is above the recorded target {old.target}")
        self.record_of[pool_uid] = replace(old, published=max(old.published, epoch))

    async def note_granting(self, pool_uid: str) -> None:
        self.record_of[pool_uid] = replace(await self.load(pool_uid), granting=True)


class Pool:
    """A pool whose hub runs in this process.

    Args:
        directory: gets the credentials folder that engines read.
        name: of the pool.
        join_after_seconds, lease_seconds, weights_source: as in the pool's spec.
        stores: reaches the pool's store, for `configure(store_admin=True)`.
    """

    def __init__(
        self,
        directory: Path,
        name: str = "policy",
        lease_seconds: float = 30.0,
        join_after_seconds: float = 0.0,
        weights_source: Literal["Pushed", "Model"] = "Pushed",
        stores: StoreAdmin | None = None,
    ) -> None:
        self.name, self.uid = name, str(uuid.uuid4())
        self.authority = SoloAuthority()
        self._weights_source: Literal["Pushed", "Model"] = weights_source
        self.credentials = directory / "fence"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="hub", daemon=True)
        self._hub_keys = HubKeys(*generate_keypair())
        self._stores = stores
        client = generate_keypair()
        self.credentials.mkdir(parents=True, mode=0o700)
        self._write("hub.pub", self._hub_keys.public)
        self._write("root.secret", secrets.token_hex(32))
        self._write("client.pub", client.public)
        self._write("client.key", client.secret)
        self._config = PoolConfig(
            self.uid,
            f"default/{name}",
            (client.public,),
            lease_seconds=lease_seconds,
            join_after_seconds=join_after_seconds,
            weights_source=weights_source,
        )
        self._hub: HubServer | None = None
        self.endpoint = "tcp://127.0.0.1:0"

    def start_hub(self) -> None:
        """Start the hub (again, at the same address, as a new term)."""
        self.authority.term = Term("standalone", self.authority.term.transitions + 1)
        self._hub = self._run(self._make_hub())
        self.endpoint = self._hub.endpoint

    async def _make_hub(self) -> HubServer:
        hub = HubServer(self.endpoint, self._hub_keys, self.authority, stores=self._stores)
        await hub.start()
        hub.set_pool(self._config)
        hub.lead(self.authority.term)
        return hub

    def stop_hub(self) -> None:
        """Stop it; engines keep what they were granted until their leases run out."""
        if self._hub is not None:
            self._run(self._hub.stop())
            self._hub = None

    def snapshot(self) -> PoolSnapshot:
        """The pool as the hub knows it now."""
        return self._call(lambda: self._running().snapshot(self.uid))

    def configure(self, **changes: Any) -> None:
        """Change fields of the pool's `PoolConfig` under the running hub, as an owner who edits the spec does."""
        self._config = replace(self._config, **changes)
        self._call(lambda: self._running().set_pool(self._config))

    def rotate_keys(self) -> None:
        """Give the pool a new client key; the one before is accepted as well, until `forget_old_keys`."""
        client = generate_keypair()
        self.configure(client_public_keys=(client.public, self._config.client_public_keys[0]))
        self._write("client.pub", client.public)
        self._write("client.key", client.secret)

    def forget_old_keys(self) -> None:
        """Accept the newest client key alone."""
        self.configure(client_public_keys=self._config.client_public_keys[:1])

    def connection(self) -> dict[str, Any]:
        """What a client needs to know: the content of a `connection.json`."""
        return {
            "pool": {"name": self.name, "namespace": "default", "uid": self.uid},
            "hub": {"endpoint": self.endpoint, "credentials_dir": str(self.credentials)},
        }

    def _write(self, file: str, text: str) -> None:
        path = self.credentials / file
        path.touch(mode=0o600)
        path.write_text(text)

    def wait_engines(self, num_engines: int, seconds: float = 60.0) -> None:
        """Return once that many engines are at the target in mode Use."""
        self._wait(
            lambda: sum(view.alive and view.converged and view.mode is Mode.USE for view in self.snapshot().engines) >= num_engines,
            seconds,
            f"{num_engines} engines in use of the epoch",
        )

    def bump(self, seconds: float = 60.0) -> int:
        """Raise the epoch by one and return it once it is published."""
        epoch = self.snapshot().target + 1
        self._call(lambda: self._running().request(self.uid, epoch))
        self._wait(lambda: self.snapshot().published >= epoch, seconds, f"epoch {epoch} published")
        return epoch

    def connector(self, local_bytes: int | None = None, master_address: str | None = None, **extra: Any) -> dict[str, Any]:
        """`--kv-transfer-config` of an engine of this pool; L1 and L2 as far as they are given."""
        config: dict[str, Any] = {
            **self.connection(),
            "weights_source": self._weights_source,
            "tracker": master_address is None,
        }
        if local_bytes is not None:
            config["local"] = {"capacity_bytes": local_bytes}
        if master_address is not None:
            config["distributed"] = {"master_address": master_address}
        return {
            "kv_connector": "EpochKVConnector",
            "kv_connector_module_path": "epochkv_connector.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {**config, **extra},
        }

    def _running(self) -> HubServer:
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
        deadline = time.monotonic() + seconds
        while not ready():
            if time.monotonic() > deadline:
                raise TimeoutError(f"pool {self.name}: not {what} after {seconds:.0f} s; the hub knows {self.snapshot()}")
            time.sleep(0.01)

    def __enter__(self) -> Self:
        self._thread.start()
        self.start_hub()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop_hub()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)
        self._loop.close()
