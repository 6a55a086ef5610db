"""What must hold at every moment: no epoch goes down, none is published unasked, none while an engine may use an older one."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field
from typing import Any

from epochkv_fence.common import lease_clock
from epochkv_fence.net.keys import ClientKeys
from tests.cluster.fence_engines import FenceEngine, client_keys
from tests.cluster.operator_harness import CHILDREN, POOLS, Namespace

EVERY_SECONDS = 0.1
JOIN_EVERY_SECONDS = 1.0
ENGINES_OF_A_POOL = 2


@dataclass
class _Pool:
    """One life of a pool."""

    target: int = 0
    epoch: int = 0
    engines: list[FenceEngine] = field(default_factory=list)


class EpochWatch:
    """Context manager: looks at all pools of a namespace, and has engines with real agents join them."""

    def __init__(self, space: Namespace, endpoint: str, engines: int = ENGINES_OF_A_POOL) -> None:
        self._space, self._endpoint, self._num_engines = space, endpoint, engines
        self._pools: dict[str, _Pool] = {}
        self._over, self._leave = threading.Event(), threading.Event()
        self._threads = [threading.Thread(target=self._watch), threading.Thread(target=self._join)]
        self.problems: list[str] = []
        self.looked = 0

    def __enter__(self) -> EpochWatch:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()
        self._over.set()
        self._threads[0].join(30)

    def leave(self) -> None:
        """All engines end; what they have adopted until now is in the verdict."""
        self._leave.set()
        self._threads[1].join(60)
        for pool in self._pools.values():
            for engine in pool.engines:
                with contextlib.suppress(AssertionError):
                    engine.__exit__()

    @property
    def published(self) -> int:
        """Epochs that were seen published, over all pools."""
        return sum(pool.epoch for pool in self._pools.values())

    @property
    def adopted(self) -> int:
        return sum(len(engine.adopted) for pool in self._pools.values() for engine in pool.engines)

    def agents(self) -> str:
        """How each engine stands with its hub, for who looks for what went wrong."""
        lines = [
            f"{engine.agent.endpoint}: {engine.agent.view}, {dict(engine.agent.counters)}"
            for pool in self._pools.values()
            for engine in pool.engines
        ]
        return "\n".join(["engines:", *lines])

    def _watch(self) -> None:
        while not self._over.wait(EVERY_SECONDS):
            with contextlib.suppress(AssertionError, OSError):
                for pool in self._space.request("GET", POOLS.format(self._space.name))["items"]:
                    self.look(pool)
                self.looked += 1

    def look(self, obj: Any) -> None:
        """One state of a pool: how it is now, read before the engines are asked."""
        metadata, status = obj["metadata"], obj.get("status") or {}
        pool = self._pools.setdefault(metadata["uid"], _Pool())
        target, epoch = status.get("targetEpoch") or 0, status.get("epoch") or 0
        about = f"pool {metadata['name']} (uid {metadata['uid']})"
        if (target, epoch) < (pool.target, pool.epoch) or epoch < pool.epoch:
            self._problem(f"{about}: target and epoch went from {pool.target}, {pool.epoch} to {target}, {epoch}")
        if epoch > target or target > obj["spec"].get("resetEpoch", 0):
            asked = obj["spec"].get("resetEpoch", 0)
            self._problem(f"{about}: epoch {epoch} of target {target}, and only {asked} was asked for")
        for engine in list(pool.engines):
            view = engine.agent.view
            if view.epoch is not None and view.epoch < epoch and lease_clock() < view.lease_until:
                self._problem(f"{about}: epoch {epoch} is published, and an engine may use {view.epoch}")
        pool.target, pool.epoch = target, epoch

    def _problem(self, text: str) -> None:
        if text not in self.problems:
            self.problems.append(text)

    def _join(self) -> None:
        """Each life of a pool has engines, as soon as its Secret is there."""
        while not self._leave.wait(JOIN_EVERY_SECONDS):
            with contextlib.suppress(AssertionError, OSError, KeyError):
                for secret in self._space.request("GET", CHILDREN["secrets"].format(self._space.name))["items"]:
                    owner = (secret["metadata"].get("ownerReferences") or [{}])[0].get("uid")
                    pool = self._pools.get(owner)
                    if pool is not None and not pool.engines:
                        pool.engines += [self._engine(secret, number) for number in range(self._num_engines)]

    def _engine(self, secret: Any, number: int) -> FenceEngine:
        name = secret["metadata"]["name"]

        def read() -> ClientKeys:
            """As a kubelet refreshes them: also when another life of the pool has other keys."""
            return client_keys(self._space.get(CHILDREN["secrets"], name) or secret)

        pool = secret["metadata"]["ownerReferences"][0]["uid"]
        engine = FenceEngine(self._endpoint, client_keys(secret), f"{name}-{number}", credentials=read, pool=pool, gives_back=(0, 0))
        return engine.__enter__()
