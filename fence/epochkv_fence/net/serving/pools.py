"""The pools that a hub serves, and whose keys their clients have."""

from __future__ import annotations

from collections.abc import Iterator

from epochkv_fence.net.gate.router import Client
from epochkv_fence.net.keys import check_key
from epochkv_fence.net.serving.served import ServedPool
from epochkv_fence.protocol.pool import PoolConfig


class UnknownPool(KeyError):
    """The hub has no pool of this uid; `set_pool` first."""

    def __str__(self) -> str:
        return f"the hub has no pool with uid {self.args[0]!r}; call set_pool first"


class Pools:
    """All pools of one hub. Whoever iterates may add and remove pools meanwhile."""

    def __init__(self) -> None:
        self._pools: dict[str, ServedPool] = {}
        self._clients: dict[str, Client] = {}

    def __iter__(self) -> Iterator[ServedPool]:
        return iter(list(self._pools.values()))

    def __getitem__(self, uid: str) -> ServedPool:
        try:
            return self._pools[uid]
        except KeyError:
            raise UnknownPool(uid) from None

    def __contains__(self, pool: ServedPool) -> bool:
        """The hub still serves this pool. One that was removed and set again is another pool."""
        return self._pools.get(pool.config.uid) is pool

    def client(self, key: str) -> Client | None:
        return self._clients.get(key)

    def put(self, config: PoolConfig) -> tuple[ServedPool, PoolConfig | None]:
        """Add a pool, or give it another configuration. Returns the pool, and its configuration before; None: it is new.

        Raises:
            ValueError: a key is malformed or belongs to another pool.
        """
        for key in config.client_public_keys:
            check_key(f"client public key of pool {config.name!r}", key)
            owner = client.pool if (client := self._clients.get(key)) is not None else None
            if isinstance(owner, ServedPool) and owner.config.uid != config.uid:
                raise ValueError(f"pool {config.name!r} has the client key of pool {owner.config.name!r}; give each pool its own key pair")
        pool = self._pools.get(config.uid)
        before = pool.config if pool is not None else None
        if pool is None:
            pool = self._pools[config.uid] = ServedPool(config)
        if before != config:
            self._forget_keys(pool)
            for index, key in enumerate(config.client_public_keys):
                self._clients.setdefault(key, Client(pool, index))
            pool.config = config
        return pool, before

    def remove(self, uid: str) -> ServedPool | None:
        """Forget a pool; None: the hub has none of this uid."""
        pool = self._pools.pop(uid, None)
        if pool is not None:
            self._forget_keys(pool)
        return pool

    def _forget_keys(self, pool: ServedPool) -> None:
        self._clients = {key: client for key, client in self._clients.items() if client.pool is not pool}
