"""The store as the hub's thread sees it: it reads what is there, and hands what it learns to the thread that owns the store."""

from __future__ import annotations

from collections.abc import Callable

from epochkv_operator.kube.client import Json
from epochkv_operator.kube.store import Store, resource_version

Learn = Callable[[str, Json], object]
"""Has the owner of the store take in a state of an object of a kind. Called on the hub's thread."""


class Echo:
    """`status.Known` of the hub's writes. Its own last answers count at once: the owner may be busy for a while."""

    def __init__(self, store: Store, learn: Learn) -> None:
        self._store = store
        self._learn = learn
        self._own: dict[str, Json] = {}

    def by_uid(self, kind: str, uid: str) -> Json | None:
        """The newest state that either has seen."""
        own, stored = self._own.get(uid), self._store.by_uid(kind, uid)
        if own is None or stored is None:
            return own or stored
        if resource_version(stored) < resource_version(own):
            return own
        del self._own[uid]  # the owner has caught up
        return stored

    def upsert(self, kind: str, obj: Json) -> None:
        self.learn(obj)
        self._learn(kind, obj)

    def learn(self, obj: Json) -> None:
        """A state that the owner hears of in another way."""
        uid = obj["metadata"]["uid"]
        own = self._own.get(uid)
        if own is None or resource_version(own) < resource_version(obj):
            self._own[uid] = obj

    def forget(self, uid: str) -> None:
        self._own.pop(uid, None)
