"""What reconcilers ask of the hub, which lives on another thread. Each answer is the hub's own, of the moment of the call."""

from __future__ import annotations

from functools import partial

from epochkv_operator.api import KVCachePool
from epochkv_operator.hub.loop import LoopThread
from epochkv_operator.hub.service import AcceptedKeys, HubLook, HubService
from epochkv_operator.kube.client import Json


class HubPort:
    """Calls of `HubService`, by the same names. They wait for the hub's loop, which never waits for us; `seen` does not wait."""

    def __init__(self, thread: LoopThread, hub: HubService) -> None:
        self._thread = thread
        self._hub = hub

    def ensure(self, pool: KVCachePool, keys: AcceptedKeys, *, new: bool = False) -> None:
        self._thread.call(partial(self._hub.ensure, pool, keys, new=new))

    def forget(self, namespace: str, name: str) -> list[str]:
        return self._thread.call(self._hub.forget, namespace, name)

    def seen(self, pool: Json) -> None:
        self._thread.post(self._hub.seen, pool)

    def resetting(self, pool_uid: str) -> bool:
        return self._thread.call(self._hub.resetting, pool_uid)

    def look(self, pool_uid: str, newest: Json | None = None) -> HubLook:
        return self._thread.call(self._hub.look, pool_uid, newest)

    def old_key_idle_seconds(self, pool_uid: str) -> float:
        return self._thread.call(self._hub.old_key_idle_seconds, pool_uid)

    def export_metrics(self) -> None:
        self._thread.call(self._hub.export_metrics)
