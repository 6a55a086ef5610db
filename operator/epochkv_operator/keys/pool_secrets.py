"""One Secret per pool, with its client key pair and root secret.

Two operators that race end up with one content: the second create fails and reads, and every change is a
compare-and-swap. A pool's Secret is bound to the pool's uid by its owner reference; a namesake's leftover is deleted, by
uid, before a new one is made, so that a recreated pool never inherits names or keys. A Secret that was deleted or edited comes back
as this process remembers it: running engines hold these keys. `judge.py` says what counts when nothing is remembered.

A pool's Secret is not `immutable`: the kubelet neither refreshes immutable Secrets in mounted volumes nor would a rotated
key reach running engines. Rotation is three writes, and each of them alone leaves every engine with a key that works:

1. The hub accepts the new pair, too (in memory), *before* anybody can have it.
2. One write puts the new pair into the Secret, and the public key of the older one beside it as `previous.pub`, so that
   whoever leads next accepts both.
3. When no live boot has used the older key for a while, one write removes `previous.pub`; then the hub forgets the key.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import structlog

from epochkv_fence.net import KeyPair, generate_keypair
from epochkv_operator.api.base import POOL_LABEL
from epochkv_operator.keys import judge
from epochkv_operator.keys.content import CHECK, FIRST, GENERATION, ROOT, FenceKeys, content, decoded, encoded
from epochkv_operator.keys.secret import count, is_labelled, labels_of, manifest, owner_reference
from epochkv_operator.kube.client import Forbidden, Invalid, Json, KubeClient, NotFound
from epochkv_operator.kube.resources import POOLS, SECRETS
from epochkv_operator.planning.names import component_name

log = structlog.get_logger(__name__)
_YOUNG: Final = (CHECK, FIRST, GENERATION)
"""Fields that Secrets of older operators lack."""
_ALONE: Final = "an engine that started in between shares KV with no other: delete its pod"


class SecretConflict(Exception):
    """A Secret of that name exists and is not ours to replace."""


@dataclass(frozen=True)
class Ensured:
    """A pool's keys, and what to tell the user when somebody else had changed the Secret."""

    keys: FenceKeys
    note: str = ""


@dataclass
class _Pool:
    """What is known of one pool's Secret."""

    place: tuple[str, str]
    """Namespace and name of the pool."""
    keys: FenceKeys | None = None
    new: bool = False
    """This process made the keys, for a pool without a status: nobody can have been granted anything before."""
    refusal: str | None = None
    """Why there are no keys, in words."""
    conflict: bool = False
    """The Secret is somebody else's: another try does not help."""
    drawn: KeyPair | None = None
    """The pair that the next rotation brings; it stays the same one until it is in the Secret."""


class FenceSecrets:
    """The pools' Secrets. Remembers contents by pool uid."""

    def __init__(self, client: KubeClient, hub_public: str) -> None:
        self._client = client
        self._hub_public = hub_public
        self._pools: dict[str, _Pool] = {}

    def known(self, pool_uid: str) -> FenceKeys | None:
        pool = self._pools.get(pool_uid)
        return pool.keys if pool is not None else None

    def new(self, pool_uid: str) -> bool:
        """Whether no engine can have joined the pool before this process."""
        return self._pools[pool_uid].new

    def decided(self, pool_uid: str) -> bool:
        """Whether the pool's keys are known, or known to be impossible to have."""
        pool = self._pools.get(pool_uid)
        return pool is not None and (pool.keys is not None or pool.conflict)

    def refusal(self, pool_uid: str) -> str | None:
        """Why the pool has no keys, in words; None when it has some or was not looked at yet."""
        pool = self._pools.get(pool_uid)
        return pool.refusal if pool is not None and pool.keys is None else None

    def forget(self, namespace: str, name: str) -> None:
        """The pool is gone, or another one of its name has come: nobody may ever be given its keys again."""
        self._pools = {uid: pool for uid, pool in self._pools.items() if pool.place != (namespace, name)}

    async def ensure(self, pool: Json) -> Ensured:
        """Make sure that the pool's Secret exists, is bound to this pool's uid and holds what it should.

        Raises:
            SecretConflict: the Secret belongs to somebody else.
            ApiError
        """
        uid, place = pool["metadata"]["uid"], (pool["metadata"]["namespace"], pool["metadata"]["name"])
        if uid not in self._pools:
            self.forget(*place)
            self._pools[uid] = _Pool(place)
        known = self._pools[uid]
        known.refusal = None
        try:
            ensured = await self._ensure(pool, known)
        except SecretConflict as error:
            known.conflict, known.refusal = True, str(error)
            raise
        except (Forbidden, Invalid) as error:
            known.refusal = f"Secret {'/'.join(_place(pool))} with the pool's keys cannot be read or made: {error.message}"
            raise
        known.conflict = False
        self._remember(known, ensured.keys)
        return ensured

    async def _ensure(self, pool: Json, known: _Pool) -> Ensured:
        metadata = pool["metadata"]
        namespace, name = _place(pool)
        try:
            found = await self._client.get(SECRETS, namespace, name)
        except NotFound:
            return await self._make(pool, known)
        owner = _owner(found, metadata["name"])
        if owner is None and not _adoptable(found, metadata["name"], known):
            raise SecretConflict(f"Secret {namespace}/{name} exists and is not this operator's; delete it, the pool needs that name")
        orphan = owner is None and known.keys is None and not judge.made_for(decoded(found), metadata["uid"])
        if orphan or (owner is not None and owner["uid"] != metadata["uid"]):
            await self._delete(found, "it belonged to a deleted pool of the same name")
            return await self._make(pool, known)
        verdict = self._judge(pool, known, found)
        wanted = content(verdict.keys, metadata["uid"])
        fields = decoded(found)
        if found.get("immutable"):
            fields = {**{field: wanted[field] for field in _YOUNG}, **fields}
        if owner is not None and all(fields.get(field) == value for field, value in wanted.items()) and not verdict.changes:
            return Ensured(verdict.keys)
        await self._bring(pool, found, verdict.keys, "; ".join(verdict.changes) or "fields or owner were missing")
        return Ensured(verdict.keys, _told(f"Secret {namespace}/{name}", verdict, restored=known.keys is not None))

    def _judge(self, pool: Json, known: _Pool, found: Json) -> judge.Judged:
        uid, asked, fields = pool["metadata"]["uid"], _asked(pool), decoded(found)
        if known.keys is None:
            return judge.judged(fields, self._hub_public, uid, asked)
        if found.get("immutable"):  # perhaps of an older operator, and nobody has changed it since
            wanted = content(known.keys, uid)
            fields = {**{field: wanted[field] for field in _YOUNG}, **fields}
        return judge.remembered(known.keys, fields, uid, asked, known.drawn)

    async def _make(self, pool: Json, known: _Pool) -> Ensured:
        """There is no Secret: make it as it was, or a new one."""
        place, status = "/".join(_place(pool)), pool.get("status") or {}
        if known.keys is not None:
            note = f"Secret {place} was deleted: it is back with the same keys. To replace the client key, raise spec.keys.generation"
            await self._create(pool, known.keys, "it was deleted")
            return Ensured(known.keys, note)
        keys = judge.made(self._hub_public, _asked(pool))
        served = "keys" in status
        known.new = not served and not {"epoch", "targetEpoch", "granting", "proof"} & status.keys()
        await self._create(pool, keys, "it was deleted while no operator ran" if served else "the pool is new")
        lost = "was deleted while no operator ran: its keys are new, engines restart with them, and KV that is stored is not found any more"
        return Ensured(keys, f"Secret {place} {lost} (misses)" if served else "")

    def draw(self, pool_uid: str) -> None:
        """Draw the pair that the next rotation brings, unless there is one."""
        pool = self._pools[pool_uid]
        pool.drawn = pool.drawn or generate_keypair()

    def accepted(self, pool_uid: str) -> tuple[str, ...]:
        """Public keys that the hub has to accept, the newest first."""
        pool = self._pools[pool_uid]
        assert pool.keys is not None  # asked only for pools that have some
        return pool.keys.accepted if pool.drawn is None else (pool.drawn.public, pool.keys.client.public)

    async def rotate(self, pool: Json, generation: int) -> FenceKeys:
        """Put the drawn pair into the Secret, with the older public key beside it. The hub must accept both already.

        Raises:
            SecretConflict: the Secret cannot be changed; the text says what to do.
            ApiError: also when somebody else has changed it meanwhile.
        """
        known, (namespace, name) = self._pools[pool["metadata"]["uid"]], _place(pool)
        found = await self._client.get(SECRETS, namespace, name)
        keys = self._judge(pool, known, found).keys
        if keys.generation >= generation or keys.previous is not None:
            known.drawn, known.keys = None, keys
            return keys  # done, perhaps by a write of ours whose answer was lost; or one rotation is still under way
        if found.get("immutable"):
            raise SecretConflict(
                f"Secret {namespace}/{name} was made by an older operator and cannot be changed: delete it, the operator makes it again"
                " with the same keys while it runs, and rotates them then; pods that mounted the deleted one see new keys after a restart"
            )
        assert known.drawn is not None  # by `draw`, before the hub accepted it
        rotated = replace(keys, client=known.drawn, generation=generation, previous=keys.client.public)
        await self._replace(pool, found, rotated, f"key generation {generation}")
        return self._remember(known, rotated)

    async def retire(self, pool: Json) -> FenceKeys:
        """Take the older public key out of the Secret.

        Raises:
            ApiError
        """
        known = self._pools[pool["metadata"]["uid"]]
        found = await self._client.get(SECRETS, *_place(pool))
        keys = self._judge(pool, known, found).keys
        if keys.previous is not None:
            keys = replace(keys, previous=None)
            await self._replace(pool, found, keys, "nobody uses the older key any more")
        return self._remember(known, keys)

    @staticmethod
    def _remember(pool: _Pool, keys: FenceKeys) -> FenceKeys:
        pool.keys = keys
        if keys.previous is not None:  # a rotation is in the Secret, ours or another operator's
            pool.drawn = None
        return keys

    async def _bring(self, pool: Json, found: Json, keys: FenceKeys, why: str) -> None:
        if found.get("immutable"):
            await self._delete(found, why)
            await self._create(pool, keys, why)
        else:
            await self._replace(pool, found, keys, why)

    async def _replace(self, pool: Json, found: Json, keys: FenceKeys, why: str) -> None:
        """Compare-and-swap of all our fields: `found` carries its resourceVersion."""
        metadata, ours = found["metadata"], encoded(content(keys, pool["metadata"]["uid"]))
        foreign = {name: value for name, value in (found.get("data") or {}).items() if name not in judge.FIELDS}
        others = [owner for owner in metadata.get("ownerReferences") or [] if owner.get("kind") != POOLS.kind]
        owned = {
            **metadata,
            "labels": {**(metadata.get("labels") or {}), **labels_of(pool["metadata"]["name"])},
            "ownerReferences": [*others, owner_reference(pool)],
        }
        body = {**found, "kind": "Secret", "apiVersion": "v1", "metadata": owned, "data": {**foreign, **ours}}
        await self._client.replace(SECRETS, metadata["namespace"], body)
        count("replace")
        log.info("fence secret changed", secret=f"{metadata['namespace']}/{metadata['name']}", reason=why, generation=keys.generation)

    async def _create(self, pool: Json, keys: FenceKeys, why: str) -> None:
        metadata, (namespace, name) = pool["metadata"], _place(pool)
        fields = content(replace(keys, hub_public=self._hub_public), metadata["uid"])
        await self._client.create(
            SECRETS, namespace, manifest(namespace, name, fields, {POOL_LABEL: metadata["name"]}, [owner_reference(pool)])
        )
        count("create")
        log.info("fence secret created", secret=f"{namespace}/{name}", pool_uid=metadata["uid"], reason=why)

    async def _delete(self, found: Json, why: str) -> None:
        metadata = found["metadata"]
        await self._client.delete(SECRETS, metadata["namespace"], metadata["name"], metadata["uid"])
        count("delete")
        log.info("fence secret deleted", secret=f"{metadata['namespace']}/{metadata['name']}", reason=why)


def _told(name: str, verdict: judge.Judged, *, restored: bool) -> str:
    """What to tell the user about the changes of others; empty without any."""
    if not verdict.changes:
        return ""
    changes = "; ".join(verdict.changes)
    if not restored:
        return f"{name} was changed while no operator ran: {changes}"
    remedy = "To replace the client key, raise spec.keys.generation"
    alone = f". If root.secret was read meanwhile: {_ALONE}" if ROOT in changes else ""
    return f"{name} was changed by somebody else and is as it was again: {changes}. {remedy}{alone}"


def _place(pool: Json) -> tuple[str, str]:
    """Namespace and name of a pool's Secret."""
    return pool["metadata"]["namespace"], component_name(pool["metadata"]["name"], "fence")


def _asked(pool: Json) -> int:
    """The generation of keys in the spec."""
    return int((pool["spec"].get("keys") or {}).get("generation") or 0)


def _owner(found: Json, pool: str) -> Json | None:
    """The owner reference to a pool of this name."""
    owners: list[Json] = found["metadata"].get("ownerReferences") or []
    return next((owner for owner in owners if (owner.get("kind"), owner.get("name")) == (POOLS.kind, pool)), None)


def _adoptable(found: Json, pool: str, known: _Pool) -> bool:
    """A Secret without an owner was made here for a pool of this name: its labels say so, and it can show for which one."""
    return is_labelled(found, pool) and (known.keys is not None or CHECK in decoded(found))
