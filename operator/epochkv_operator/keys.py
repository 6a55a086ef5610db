"""The Secret of each pool, with its client key pair and root secret, and the Secret with the hub's key pair.

A Secret is whole or it is not: `check` covers a pool's keys and its uid. While an operator leads, what it has read or made counts, and a
Secret that was deleted or edited is put back whole: running engines hold these keys. An operator that has just started takes a whole
Secret over, and replaces any other one by new keys. That costs misses and a restart of the engines, and never stale KV: epoch and weights
are part of each name. Two operators that race end up with one content: the second create fails and reads, and every change is a
compare-and-swap. A namesake's leftover is deleted, by uid, so that a recreated pool never inherits names or keys.

A pool's Secret is not `immutable`: the kubelet would not refresh it in mounted volumes. Rotation is three writes, and each of them alone
leaves every engine with a key that works:

1. The hub accepts the new pair, too (in memory), *before* anybody can have it.
2. One write puts the new pair into the Secret, and the public key of the older one beside it as `previous.pub`, so that
   whoever leads next accepts both. Whoever wants the older key rejected at once removes that field.
3. When no live engine has used the older key for a while, one write removes `previous.pub`; then the hub forgets the key.

Every engine was given the hub's public key, so another pair restarts all of them. A new one is given by stopping the operator, deleting
the Secret, and starting it again.
"""

import asyncio
import base64
import binascii
import contextlib
import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import structlog

from epochkv_fence.connection import ROOT_SECRET_FILE
from epochkv_fence.net.keys import CLIENT_FILES, CredentialsError, KeyPair, check_key, generate_keypair, public_of
from epochkv_operator import metrics
from epochkv_operator.api.base import OURS, POOL_LABEL, POOL_NAMESPACE
from epochkv_operator.api.resources import POOLS, SECRETS
from epochkv_operator.kube.client import AlreadyExists, ApiError, Invalid, Json, KubeClient, NotFound
from epochkv_operator.kube.status import EventRecorder
from epochkv_operator.planning.names import component_name, controller, copy_name

log = structlog.get_logger(__name__)
Fields = Mapping[str, str]
"""Decoded fields of a Secret. A field that is no text is empty here."""

HUB, PUBLIC, KEY = CLIENT_FILES
ROOT: Final = ROOT_SECRET_FILE
HUB_KEY: Final = "hub.key"
GENERATION: Final = "generation"
PREVIOUS: Final = "previous.pub"
CHECK: Final = "check"
FIELDS: Final = (HUB, PUBLIC, KEY, ROOT, GENERATION, PREVIOUS, CHECK)
LOOK_SECONDS: Final = 10.0
RETRY_SECONDS: Final = 2.0


# ---- what a pool's Secret holds ----


@dataclass(frozen=True)
class FenceKeys:
    """Keys of a pool. `root_secret` is hex text of 32 bytes."""

    hub_public: str
    client: KeyPair
    root_secret: str = field(repr=False)
    generation: int = 0
    previous: str | None = None
    """Public key of the pair before, while it is accepted."""

    @property
    def accepted(self) -> tuple[str, ...]:
        """Public keys, the newest first."""
        return (self.client.public,) if self.previous is None else (self.client.public, self.previous)

    @property
    def revision(self) -> str:
        """Changes when engines must restart: another hub, or another root secret. A rotated client key is read again by running engines. It
        stands in pod templates, and tells nothing of the secret."""
        mac = hmac.new(self.root_secret.encode(), self.hub_public.encode(), hashlib.sha256)
        return mac.hexdigest()[:12]


def made(hub_public: str, generation: int) -> FenceKeys:
    return FenceKeys(hub_public, generate_keypair(), secrets.token_hex(32), generation)


def content(keys: FenceKeys, pool_uid: str) -> dict[str, str]:
    """The fields of a pool's Secret; `hub.pub`, `client.*` and `root.secret` are what engines and trainers read."""
    fields = {
        HUB: keys.hub_public,
        PUBLIC: keys.client.public,
        KEY: keys.client.secret,
        ROOT: keys.root_secret,
        GENERATION: str(keys.generation),
    }
    fields[CHECK] = _check(fields, pool_uid)
    return fields if keys.previous is None else {**fields, PREVIOUS: keys.previous}


def whole(found: Fields, pool_uid: str) -> FenceKeys | None:
    """The keys in a Secret that is as some operator wrote it for this pool; else None. `previous.pub` may be missing."""
    if not hmac.compare_digest(found.get(CHECK, "").encode(), _check(found, pool_uid).encode()):
        return None
    try:
        previous = found.get(PREVIOUS)
        if previous is not None:
            check_key(PREVIOUS, previous)
        return FenceKeys(found[HUB], KeyPair(found[PUBLIC], found[KEY]), found[ROOT], int(found[GENERATION]), previous)
    except (CredentialsError, KeyError, ValueError):
        return None


def follows(known: FenceKeys, found: FenceKeys, drawn: KeyPair | None) -> bool:
    """Whether a whole Secret is what this process knows, or what its operators make of it: without the older key, or with a newer one.
    `drawn`: the pair of our own rotation, whose write may have had no answer."""
    same = (found.hub_public, found.root_secret) == (known.hub_public, known.root_secret)
    if (found.client, found.generation) == (known.client, known.generation):
        return same and found.previous in (None, known.previous)
    rotated = found.previous == known.client.public or (found.previous is None and found.client == drawn)
    return same and rotated and found.generation > known.generation


def _check(fields: Fields, pool_uid: str) -> str:
    """Of everything but `hub.pub`, which may be the hub's new one, and `previous.pub`, which may be removed."""
    said = "|".join((pool_uid, *(fields.get(name, "") for name in (PUBLIC, KEY, GENERATION))))
    return hmac.new(fields.get(ROOT, "").encode(), said.encode(), hashlib.sha256).hexdigest()[:32]


# ---- Secrets as API objects ----


def encoded(fields: Fields) -> dict[str, str]:
    """As `data` of a Secret."""
    return {name: base64.b64encode(value.encode()).decode() for name, value in fields.items()}


def decoded(secret: Json) -> dict[str, str]:
    """The fields of a Secret."""
    return {name: _text(value) for name, value in (secret.get("data") or {}).items()}


def _text(value: str | None) -> str:
    try:
        return base64.b64decode(value or "", validate=True).decode()
    except (binascii.Error, UnicodeError):
        return ""


def manifest(namespace: str, name: str, fields: Fields, labels: Mapping[str, str], owners: list[Json], *, immutable: bool = False) -> Json:
    """A Secret to create."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "namespace": namespace, "labels": {**OURS, **labels}, "ownerReferences": owners},
        "type": "Opaque",
        "immutable": immutable,
        "data": encoded(fields),
    }


def copied(pool_namespace: str, pool: str, namespace: str, fields: Fields) -> Json:
    """A copy of a pool's Secret for another namespace, which no object there can own: it names its pool."""
    body = manifest(namespace, copy_name(pool_namespace, pool, "fence"), fields, {POOL_LABEL: pool}, [])
    body["metadata"]["annotations"] = {POOL_NAMESPACE: pool_namespace}
    return body


def _owner(found: Json, pool: str) -> Json | None:
    """The owner reference to a pool of this name."""
    owners: list[Json] = found["metadata"].get("ownerReferences") or []
    return next((owner for owner in owners if (owner.get("kind"), owner.get("name")) == (POOLS.kind, pool)), None)


def _place(pool: Json) -> tuple[str, str]:
    """Namespace and name of a pool's Secret."""
    return pool["metadata"]["namespace"], component_name(pool["metadata"]["name"], "fence")


# ---- the pools' Secrets ----


class SecretConflict(Exception):
    """A Secret of that name exists and is not ours to replace."""


@dataclass
class PoolKeys:
    """What is known of one pool's Secret."""

    place: tuple[str, str] = ("", "")
    """Namespace and name of the pool."""
    keys: FenceKeys | None = None
    new: bool = False
    """This process made the keys, for a pool without a status: nobody can have been granted anything before."""
    refusal: str | None = None
    """Why there are no keys, in words; None where there are some, or the pool was not reconciled yet."""
    conflict: bool = False
    """The Secret is somebody else's: another try does not help."""
    drawn: KeyPair | None = None
    """The pair that the next rotation brings; it stays the same one until it is in the Secret."""

    @property
    def accepted(self) -> tuple[str, ...]:
        """Public keys that the hub has to accept, the newest first. Asked only where there are keys."""
        assert self.keys is not None
        return self.keys.accepted if self.drawn is None else (self.drawn.public, self.keys.client.public)


@dataclass(eq=False)
class FenceSecrets:
    """The pools' Secrets. Remembers contents by pool uid."""

    _client: KubeClient
    _hub_public: str
    _pools: dict[str, PoolKeys] = field(default_factory=dict)

    def of(self, pool_uid: str) -> PoolKeys:
        """What is known of this pool's Secret; nothing before `ensure`."""
        return self._pools.get(pool_uid, PoolKeys())

    def forget(self, namespace: str, name: str) -> None:
        """The pool is gone, or another one of its name has come: nobody may ever be given its keys again."""
        self._pools = {uid: pool for uid, pool in self._pools.items() if pool.place != (namespace, name)}

    async def ensure(self, pool: Json) -> tuple[FenceKeys, str]:
        """Make sure that the pool's Secret exists, is bound to this pool's uid and holds what it should. Returns the keys, and what to
        tell the user when somebody else had changed the Secret.

        Raises:
            SecretConflict: the Secret belongs to somebody else.
            ApiError
        """
        uid, place = pool["metadata"]["uid"], (pool["metadata"]["namespace"], pool["metadata"]["name"])
        if uid not in self._pools:
            self.forget(*place)
            self._pools[uid] = PoolKeys(place)
        known = self._pools[uid]
        known.refusal = None
        try:
            keys, note = await self._ensure(pool, known)
        except SecretConflict as error:
            known.conflict, known.refusal = True, str(error) if known.keys is None else None
            raise
        except ApiError as error:
            had = error.status >= 500 and "keys" in (pool.get("status") or {})  # a new operator will find them in a moment
            if known.keys is None and not had and error.status not in (0, 409, 429):  # over in a moment, or not about Secrets alone
                known.refusal = f"Secret {'/'.join(_place(pool))} with the pool's keys cannot be read or made: {error.message}"
            raise
        known.conflict = False
        return self._remember(known, keys), note

    async def _ensure(self, pool: Json, known: PoolKeys) -> tuple[FenceKeys, str]:
        (namespace, name), uid = _place(pool), pool["metadata"]["uid"]
        try:
            found = await self._client.get(SECRETS, namespace, name)
        except NotFound:
            return await self._make(pool, known)
        owner = _owner(found, pool["metadata"]["name"])
        if owner is None and not self._labels(pool).items() <= (found["metadata"].get("labels") or {}).items():
            raise SecretConflict(f"Secret {namespace}/{name} exists and is not this operator's; delete it, the pool needs that name")
        fields = decoded(found)
        ours = known.keys is not None or whole(fields, uid) is not None
        if owner["uid"] != uid if owner is not None else not ours:
            await self._delete(found, "it belonged to a deleted pool of the same name")
            return await self._make(pool, known)
        keys, note = self._judge(pool, known, fields)
        wanted = content(keys, uid)
        if owner is None or note or any(fields.get(field) != wanted.get(field) for field in FIELDS):
            await self._put(pool, found, keys, note or "its owner was missing")
        return keys, note

    def _judge(self, pool: Json, known: PoolKeys, fields: Fields) -> tuple[FenceKeys, str]:
        """What the Secret should hold, and what to tell the user if somebody else has changed it."""
        uid, name = pool["metadata"]["uid"], f"Secret {'/'.join(_place(pool))}"
        found = whole(fields, uid)
        if known.keys is not None:
            if found is not None and follows(known.keys, found, known.drawn):
                return found, ""
            wanted = content(known.keys, uid)
            wrong = [field for field in FIELDS if fields.get(field) != wanted.get(field)]
            note = f"{name} was changed by somebody else ({', '.join(wrong)}) and is as it was again"
            if ROOT in wrong:
                note += ". An engine that started in between shares KV with no other: delete its pod"
            return known.keys, f"{note}. To replace the client key, raise spec.keys.generation"
        if found is None:
            lost = "its keys are new, engines restart with them, and KV that is stored is not found any more (misses)"
            return made(self._hub_public, _asked(pool)), f"{name} was changed while no operator ran: {lost}"
        if found.hub_public != self._hub_public:
            why = "the hub has a new key pair, or somebody changed the field"
            note = f"{name} had another {HUB} than the hub's: {why}. Engines that were given another one restart"
            return replace(found, hub_public=self._hub_public), note
        return found, ""

    async def _make(self, pool: Json, known: PoolKeys) -> tuple[FenceKeys, str]:
        """There is no Secret: make it as it was, or a new one."""
        place, status = "/".join(_place(pool)), pool.get("status") or {}
        if known.keys is not None:
            note = f"Secret {place} was deleted: it is back with the same keys. To replace the client key, raise spec.keys.generation"
            await self._create(pool, known.keys, "it was deleted")
            return known.keys, note
        keys = made(self._hub_public, _asked(pool))
        served = "keys" in status
        known.new = not served and not {"epoch", "targetEpoch", "granting", "proof"} & status.keys()
        await self._create(pool, keys, "it was deleted while no operator ran" if served else "the pool is new")
        lost = "was deleted while no operator ran: its keys are new, engines restart with them, and KV that is stored is not found any more"
        return keys, f"Secret {place} {lost} (misses)" if served else ""

    # ---- rotation ----

    async def rotate(self, pool: Json, generation: int) -> FenceKeys:
        """Put the drawn pair into the Secret, with the older public key beside it. The hub must accept both already.

        Raises:
            ApiError: also when somebody else has changed it meanwhile.
        """
        known, found, keys = await self._read(pool)
        if keys.generation >= generation or keys.previous is not None:
            known.drawn, known.keys = None, keys
            return keys  # done, perhaps by a write of ours whose answer was lost; or one rotation is still under way
        assert known.drawn is not None  # before the hub accepted it
        rotated = replace(keys, client=known.drawn, generation=generation, previous=keys.client.public)
        await self._put(pool, found, rotated, f"key generation {generation}")
        return self._remember(known, rotated)

    async def retire(self, pool: Json) -> FenceKeys:
        """Take the older public key out of the Secret. Raises `ApiError`."""
        known, found, keys = await self._read(pool)
        if keys.previous is not None:
            keys = replace(keys, previous=None)
            await self._put(pool, found, keys, "nobody uses the older key any more")
        return self._remember(known, keys)

    async def _read(self, pool: Json) -> tuple[PoolKeys, Json, FenceKeys]:
        known = self._pools[pool["metadata"]["uid"]]
        found = await self._client.get(SECRETS, *_place(pool))
        return known, found, self._judge(pool, known, decoded(found))[0]

    @staticmethod
    def _remember(pool: PoolKeys, keys: FenceKeys) -> FenceKeys:
        pool.keys = keys
        if keys.previous is not None:  # a rotation is in the Secret, ours or another operator's
            pool.drawn = None
        return keys

    # ---- writes ----

    async def _put(self, pool: Json, found: Json, keys: FenceKeys, why: str) -> None:
        """All our fields at once, by compare-and-swap: `found` carries its resourceVersion. One that somebody has made immutable is made
        again."""
        metadata, ours = found["metadata"], encoded(content(keys, pool["metadata"]["uid"]))
        foreign = {name: value for name, value in (found.get("data") or {}).items() if name not in FIELDS}
        others = [owner for owner in metadata.get("ownerReferences") or [] if owner.get("kind") != POOLS.kind]
        owned = {
            **metadata,
            "labels": {**(metadata.get("labels") or {}), **self._labels(pool)},
            "ownerReferences": [*others, controller(POOLS.kind, pool["metadata"]["name"], pool["metadata"]["uid"])],
        }
        body = {**found, "kind": "Secret", "apiVersion": "v1", "metadata": owned, "data": {**foreign, **ours}}
        try:
            await self._client.replace(SECRETS, metadata["namespace"], body)
        except Invalid:
            await self._delete(found, why)
            await self._create(pool, keys, why)
            return
        metrics.API_WRITES.labels(kind=SECRETS.kind, operation="replace").inc()
        log.info("fence secret changed", secret=f"{metadata['namespace']}/{metadata['name']}", reason=why, generation=keys.generation)

    async def _create(self, pool: Json, keys: FenceKeys, why: str) -> None:
        uid, (namespace, name) = pool["metadata"]["uid"], _place(pool)
        owners = [controller(POOLS.kind, pool["metadata"]["name"], uid)]
        await self._client.create(SECRETS, namespace, manifest(namespace, name, content(keys, uid), self._labels(pool), owners))
        metrics.API_WRITES.labels(kind=SECRETS.kind, operation="create").inc()
        log.info("fence secret created", secret=f"{namespace}/{name}", pool_uid=uid, reason=why)

    async def _delete(self, found: Json, why: str) -> None:
        metadata = found["metadata"]
        await self._client.delete(SECRETS, metadata["namespace"], metadata["name"], metadata["uid"])
        log.info("fence secret deleted", secret=f"{metadata['namespace']}/{metadata['name']}", reason=why)

    @staticmethod
    def _labels(pool: Json) -> dict[str, str]:
        return {**OURS, POOL_LABEL: pool["metadata"]["name"]}


def _asked(pool: Json) -> int:
    """The generation of keys in the spec."""
    return int((pool["spec"].get("keys") or {}).get("generation") or 0)


# ---- the hub's Secret ----


class _Unusable(Exception):
    """The Secret holds no key."""


@dataclass(eq=False)
class HubSecret:
    """The hub's key pair, in an immutable Secret of the operator's own namespace."""

    _client: KubeClient
    _events: EventRecorder
    _namespace: str
    _name: str
    _problem: str = ""

    async def obtain(self) -> KeyPair:
        """The pair, made on first use. Tries until there is one: what is wrong with the Secret can be put right meanwhile."""
        while True:
            try:
                return await self._obtain()
            except (ApiError, _Unusable) as error:
                self._report(f"cannot read or create the hub's key pair, trying again: {error}", unusable=isinstance(error, _Unusable))
            await asyncio.sleep(RETRY_SECONDS)

    async def guard(self, pair: KeyPair) -> None:
        """Put the Secret back as it was whenever somebody has deleted or changed it. Never returns."""
        while True:
            try:
                await self._put_back(pair)
                self._problem = ""
            except ApiError as error:
                self._report(f"cannot check the Secret with the hub's key pair, trying again: {error}", unusable=False)
            await asyncio.sleep(LOOK_SECONDS)

    async def _obtain(self) -> KeyPair:
        try:
            found = await self._client.get(SECRETS, self._namespace, self._name)
        except NotFound:
            pair = generate_keypair()
            with contextlib.suppress(AlreadyExists):  # by another operator, whose pair counts
                await self._create(pair)
                log.info("hub key pair created", secret=f"{self._namespace}/{self._name}")
                return pair
            found = await self._client.get(SECRETS, self._namespace, self._name)
        secret = decoded(found).get(HUB_KEY, "")
        try:
            check_key(HUB_KEY, secret)
        except CredentialsError as error:
            remedy = "restore the Secret, or delete it: then the hub gets a new key pair, and all engines restart"
            raise _Unusable(f"Secret {self._namespace}/{self._name}: {error}; {remedy}") from error
        return KeyPair(public_of(secret), secret)

    async def _put_back(self, pair: KeyPair) -> None:
        try:
            found = await self._client.get(SECRETS, self._namespace, self._name)
        except NotFound:
            what = "was deleted"
        else:
            fields = decoded(found)
            wrong = [name for name, value in ((HUB, pair.public), (HUB_KEY, pair.secret)) if fields.get(name) != value]
            if not wrong:
                return
            await self._client.delete(SECRETS, self._namespace, self._name, found["metadata"]["uid"])
            what = f"was changed by somebody else ({', '.join(wrong)})"
        note = f"Secret {self._namespace}/{self._name} {what}: it is back with the hub's keys"
        remedy = "To give the hub other keys: stop the operator, delete the Secret, start the operator. All engines restart then"
        about = await self._create(pair)
        log.warning("hub secret restored", secret=f"{self._namespace}/{self._name}", note=note)
        self._emit(about["metadata"], "SecretRestored", f"{note}. {remedy}")

    async def _create(self, pair: KeyPair) -> Json:
        body = manifest(self._namespace, self._name, {HUB: pair.public, HUB_KEY: pair.secret}, {}, [], immutable=True)
        created = await self._client.create(SECRETS, self._namespace, body)
        metrics.API_WRITES.labels(kind=SECRETS.kind, operation="create").inc()
        return created

    def _report(self, problem: str, *, unusable: bool) -> None:
        if problem == self._problem:
            return
        self._problem = problem
        log.warning("hub secret", problem=problem)
        if unusable:
            self._emit({"namespace": self._namespace, "name": self._name, "uid": ""}, "SecretUnusable", problem)

    def _emit(self, metadata: Json, reason: str, note: str) -> None:
        about = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata}
        self._events.emit(about, warning=True, reason=reason, action="Secret", note=note)
