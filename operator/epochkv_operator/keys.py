"""The Secret of each pool, with its client key pair and root secret, and the Secret with the hub's key pair.

Two operators that race end up with one content: the second create fails and reads, and every change is a
compare-and-swap. A pool's Secret is bound to the pool's uid by its owner reference; a namesake's leftover is deleted, by
uid, before a new one is made, so that a recreated pool never inherits names or keys. A Secret that was deleted or edited comes back
as this process remembers it: running engines hold these keys.

A pool's Secret is not `immutable`: the kubelet neither refreshes immutable Secrets in mounted volumes nor would a rotated
key reach running engines. Rotation is three writes, and each of them alone leaves every engine with a key that works:

1. The hub accepts the new pair, too (in memory), *before* anybody can have it.
2. One write puts the new pair into the Secret, and the public key of the older one beside it as `previous.pub`, so that
   whoever leads next accepts both.
3. When no live boot has used the older key for a while, one write removes `previous.pub`; then the hub forgets the key.

Every engine was given the hub's public key, so another pair restarts all of them. While an operator leads, the pair that it read or made
counts. When none runs, the Secret is all there is. So a new pair is given by stopping the operator, deleting the Secret, and starting it
again.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import structlog

from epochkv_fence.net import CredentialsError, KeyPair, generate_keypair
from epochkv_fence.net.keys import check_key, public_of
from epochkv_operator import metrics
from epochkv_operator.api.base import MANAGED_BY, POOL_LABEL
from epochkv_operator.kube.client import AlreadyExists, ApiError, Forbidden, Invalid, Json, KubeClient, NotFound
from epochkv_operator.kube.resources import POOLS, SECRETS
from epochkv_operator.kube.status import EventRecorder
from epochkv_operator.planning.names import component_name

Fields = Mapping[str, str]
"""Decoded fields of a Secret. A field that is no text is empty here."""

HUB: Final = "hub.pub"
PUBLIC: Final = "client.pub"
KEY: Final = "client.key"
ROOT: Final = "root.secret"
CHECK: Final = "root.check"
GENERATION: Final = "generation"
FIRST: Final = "first.pub"
PREVIOUS: Final = "previous.pub"
_ROOT: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class FenceKeys:
    """What the Secret `<pool>-fence` holds. `root_secret` is hex text of 32 bytes."""

    hub_public: str
    client: KeyPair
    root_secret: str = field(repr=False)
    generation: int = 0
    previous: str | None = None
    """Public key of the pair before, while it is accepted."""
    first: str = ""
    """A public key that was new when the root secret was made. It tells whether engines have the Secret's root secret."""

    @property
    def accepted(self) -> tuple[str, ...]:
        """Public keys, the newest first."""
        return (self.client.public,) if self.previous is None else (self.client.public, self.previous)


def content(keys: FenceKeys, pool_uid: str) -> dict[str, str]:
    """The fields of a pool's Secret; `hub.pub`, `client.*` and `root.secret` are what engines and trainers read."""
    fields = {
        HUB: keys.hub_public,
        PUBLIC: keys.client.public,
        KEY: keys.client.secret,
        ROOT: keys.root_secret,
        CHECK: root_check(keys.root_secret, keys.first, pool_uid),
        GENERATION: str(keys.generation),
        FIRST: keys.first,
    }
    return fields if keys.previous is None else {**fields, PREVIOUS: keys.previous}


def root_check(root_secret: str, first: str, pool_uid: str) -> str:
    """Shows an operator that remembers nothing whether a root secret is the one that was made for this pool. It tells nothing about
    the secret.
    """
    said = f"epochkv root check|{pool_uid}|{first}".encode()
    return hmac.new(bytes.fromhex(root_secret), said, hashlib.sha256).hexdigest()[:32]


def is_root(text: str) -> bool:
    """32 bytes in hex."""
    return _ROOT.fullmatch(text) is not None


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


_OURS = {"app.kubernetes.io/managed-by": MANAGED_BY, "app.kubernetes.io/part-of": "epochkv"}


def manifest(namespace: str, name: str, fields: Fields, labels: Mapping[str, str], owners: list[Json], *, immutable: bool = False) -> Json:
    """A Secret to create."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "namespace": namespace, "labels": {**_OURS, **labels}, "ownerReferences": owners},
        "type": "Opaque",
        "immutable": immutable,
        "data": encoded(fields),
    }


def labels_of(pool: str) -> dict[str, str]:
    """Labels of a pool's Secret."""
    return {**_OURS, POOL_LABEL: pool}


def is_labelled(found: Json, pool: str) -> bool:
    """The labels are those of the Secret of a pool of this name."""
    return labels_of(pool).items() <= (found["metadata"].get("labels") or {}).items()


def owner_reference(pool: Json) -> Json:
    """Of a pool's Secret to its pool."""
    metadata = pool["metadata"]
    return {
        "apiVersion": POOLS.api_version,
        "kind": POOLS.kind,
        "name": metadata["name"],
        "uid": metadata["uid"],
        "controller": True,
        "blockOwnerDeletion": False,
    }


def count(operation: str) -> None:
    """A write to a Secret."""
    metrics.API_WRITES.labels(kind="Secret", operation=operation).inc()


FIELDS: Final = (HUB, PUBLIC, KEY, ROOT, CHECK, GENERATION, FIRST, PREVIOUS)


@dataclass(frozen=True)
class Judged:
    """What the Secret should hold, and for each field that somebody else has changed a sentence. Other differences are our own work."""

    keys: FenceKeys
    changes: tuple[str, ...] = ()


def made(hub_public: str, generation: int) -> FenceKeys:
    """Keys of a pool that never had any."""
    pair = generate_keypair()
    return FenceKeys(hub_public, pair, secrets.token_hex(32), generation, first=pair.public)


def remembered(known: FenceKeys, found: Fields, pool_uid: str, asked: int, drawn: KeyPair | None) -> Judged:
    """Judge the Secret against what this process knows. `asked`: the generation in the spec; `drawn`: the pair of our own rotation."""
    wanted = content(known, pool_uid)
    if all(found.get(name) == value for name, value in wanted.items() if name != PREVIOUS):
        if PREVIOUS not in found:
            return Judged(replace(known, previous=None))
        if found[PREVIOUS] == known.previous:
            return Judged(known)
    if (rotated := _rotated(known, found, pool_uid, asked, drawn)) is not None:
        return Judged(rotated)
    wrong = [name for name in (*wanted, *([PREVIOUS] if known.previous is None else [])) if found.get(name) != wanted.get(name)]
    return Judged(known, tuple(f"{name} was {_what(name, found, wanted)}" for name in wrong))


def _what(name: str, found: Fields, wanted: Fields) -> str:
    return "removed" if name not in found else "changed" if name in wanted else "added"


def _rotated(known: FenceKeys, found: Fields, pool_uid: str, asked: int, drawn: KeyPair | None) -> FenceKeys | None:
    """The keys after a rotation of `known`; None: the Secret shows none."""
    pair, generation = _pair(found), _number(found.get(GENERATION, ""))
    if pair is None or generation is None or not known.generation < generation <= asked:
        return None
    previous = found.get(PREVIOUS)
    if previous != known.client.public and not (previous is None and pair == drawn):
        return None
    keys = replace(known, client=pair, generation=generation, previous=previous)
    return keys if all(found.get(name) == value for name, value in content(keys, pool_uid).items()) else None


def judged(found: Fields, hub_public: str, pool_uid: str, asked: int) -> Judged:
    """Judge the Secret field by field, with nothing remembered."""
    changes: list[str] = []
    changes += _hub(found, hub_public)
    client, previous, more = _client(found)
    changes += more
    generation, more = _generation(found, asked)
    changes += more
    if client.secret != found.get(KEY):
        generation = asked  # the pair is new
    root_secret, first, more = _root(found, client, pool_uid)
    changes += more
    return Judged(FenceKeys(hub_public, client, root_secret, generation, previous, first), tuple(changes))


def made_for(found: Fields, pool_uid: str) -> bool:
    """The root secret is the one that was made for this pool. Secrets of older operators do not tell."""
    root_secret, check = found.get(ROOT, ""), found.get(CHECK, "")
    return is_root(root_secret) and hmac.compare_digest(check.encode(), root_check(root_secret, found.get(FIRST, ""), pool_uid).encode())


def _hub(found: Fields, hub_public: str) -> Iterator[str]:
    if found.get(HUB) == hub_public:
        return
    try:
        check_key(HUB, found.get(HUB, ""))
    except CredentialsError:
        yield f"{HUB} was no key and is the hub's again"
    else:
        why = "the hub has a new key pair, or somebody changed the field"
        yield f"{HUB} was another key than the hub's: {why}. Engines that were given another one restart"


def _client(found: Fields) -> tuple[KeyPair, str | None, list[str]]:
    """The client key pair, and the older public key. A pair without its secret key is replaced as in a rotation."""
    changes = []
    previous = found.get(PREVIOUS)
    if previous is not None and not _is_key(previous):
        changes.append(f"{PREVIOUS} was no key and is gone; engines that still use the older key pair read the Secret again by themselves")
        previous = None
    if _is_key(found.get(KEY, "")):
        pair = KeyPair(public_of(found[KEY]), found[KEY])
        if pair.public != found.get(PUBLIC):
            changes.append(f"{PUBLIC} did not belong to {KEY} and is derived from it again")
        return pair, previous, changes
    public = found.get(PUBLIC, "")
    if _is_key(public):
        previous = public
    text = "there is a new key pair. Engines and trainers that read the Secret while they run take it by themselves"
    kept = "; until then the old one is accepted" if previous is not None else ""
    changes.append(f"{KEY} {'was no key' if KEY in found else 'was missing'}: {text}{kept}")
    return generate_keypair(), previous, changes


def _generation(found: Fields, asked: int) -> tuple[int, list[str]]:
    """One that nobody asked for says nothing about the pair. Below what is asked for, the pair is rotated."""
    if GENERATION not in found:
        return 0, []  # of an operator from before rotations
    number = _number(found[GENERATION])
    if number is not None and number <= asked:
        return number, []
    shown = "no number" if number is None else f"{number}, and spec.keys.generation is {asked}"
    return 0, [f"{GENERATION} was {shown}" + (": the key pair is replaced" if asked else "")]


def _root(found: Fields, client: KeyPair, pool_uid: str) -> tuple[str, str, list[str]]:
    """The root secret and what it is known by. Another `first.pub` restarts the engines, so that all of them have the same one."""
    root_secret, first = found.get(ROOT, ""), found.get(FIRST) or client.public
    if not is_root(root_secret):
        what = "is no secret" if ROOT in found else "is missing"
        text = f"{ROOT} {what}: it is new, engines restart with it, and KV that is stored is not found any more (misses)"
        return secrets.token_hex(32), generate_keypair().public, [text]
    if CHECK not in found or made_for(found, pool_uid):
        return root_secret, first, []
    text = f"{ROOT}, {FIRST} or {CHECK} was changed while no operator ran: engines restart, so that all of them share names again"
    return root_secret, generate_keypair().public, [text]


def _pair(found: Fields) -> KeyPair | None:
    try:
        return KeyPair(found.get(PUBLIC, ""), found.get(KEY, ""))
    except CredentialsError:
        return None


def _is_key(text: str) -> bool:
    try:
        check_key("it", text)
    except CredentialsError:
        return False
    return True


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 10 else None


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
        orphan = owner is None and known.keys is None and not made_for(decoded(found), metadata["uid"])
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

    def _judge(self, pool: Json, known: _Pool, found: Json) -> Judged:
        uid, asked, fields = pool["metadata"]["uid"], _asked(pool), decoded(found)
        if known.keys is None:
            return judged(fields, self._hub_public, uid, asked)
        if found.get("immutable"):  # perhaps of an older operator, and nobody has changed it since
            wanted = content(known.keys, uid)
            fields = {**{field: wanted[field] for field in _YOUNG}, **fields}
        return remembered(known.keys, fields, uid, asked, known.drawn)

    async def _make(self, pool: Json, known: _Pool) -> Ensured:
        """There is no Secret: make it as it was, or a new one."""
        place, status = "/".join(_place(pool)), pool.get("status") or {}
        if known.keys is not None:
            note = f"Secret {place} was deleted: it is back with the same keys. To replace the client key, raise spec.keys.generation"
            await self._create(pool, known.keys, "it was deleted")
            return Ensured(known.keys, note)
        keys = made(self._hub_public, _asked(pool))
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
        foreign = {name: value for name, value in (found.get("data") or {}).items() if name not in FIELDS}
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


def _told(name: str, verdict: Judged, *, restored: bool) -> str:
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


HUB_KEY: Final = "hub.key"
LOOK_SECONDS: Final = 10.0
RETRY_SECONDS: Final = 2.0


class _Unusable(Exception):
    """The Secret holds no key."""


class HubSecret:
    """The hub's key pair, in a Secret of the operator's own namespace."""

    def __init__(self, client: KubeClient, events: EventRecorder, namespace: str, name: str) -> None:
        self._client = client
        self._events = events
        self._namespace = namespace
        self._name = name
        self._problem = ""

    async def obtain(self) -> KeyPair:
        """The pair, made on first use. Tries until there is one: what is wrong with the Secret can be put right meanwhile."""
        while True:
            try:
                return await self._obtain()
            except (ApiError, _Unusable) as error:
                self._tell(f"cannot read or create the hub's key pair, trying again: {error}", unusable=isinstance(error, _Unusable))
            await asyncio.sleep(RETRY_SECONDS)

    async def guard(self, pair: KeyPair) -> None:
        """Put the Secret back as it was whenever somebody has deleted or changed it. Never returns."""
        self._problem = ""
        while True:
            try:
                await self._put_right(pair)
                self._problem = ""
            except ApiError as error:
                self._tell(f"cannot look after the hub's key pair, trying again: {error}", unusable=False)
            await asyncio.sleep(LOOK_SECONDS)

    async def _obtain(self) -> KeyPair:
        try:
            found = await self._client.get(SECRETS, self._namespace, self._name)
        except NotFound:
            pair = generate_keypair()
            try:
                await self._create(pair)
            except AlreadyExists:
                found = await self._client.get(SECRETS, self._namespace, self._name)
            else:
                log.info("hub key pair created", secret=f"{self._namespace}/{self._name}")
                return pair
        secret = decoded(found).get(HUB_KEY, "")
        try:
            check_key(HUB_KEY, secret)
        except CredentialsError as error:
            remedy = "restore the Secret, or delete it: then the hub gets a new key pair, and all engines restart"
            raise _Unusable(f"Secret {self._namespace}/{self._name}: {error}; {remedy}") from error
        return KeyPair(public_of(secret), secret)

    async def _put_right(self, pair: KeyPair) -> None:
        try:
            found = await self._client.get(SECRETS, self._namespace, self._name)
        except NotFound:
            about = await self._create(pair)
            self._say(about, "was deleted")
            return
        fields = decoded(found)
        wrong = [name for name, value in ((HUB, pair.public), (HUB_KEY, pair.secret)) if fields.get(name) != value]
        if wrong:  # immutable, so somebody has made it again; it is not changed, but replaced
            await self._client.delete(SECRETS, self._namespace, self._name, found["metadata"]["uid"])
            count("delete")
            about = await self._create(pair)
            self._say(about, f"was changed by somebody else ({', '.join(wrong)})")

    async def _create(self, pair: KeyPair) -> Json:
        body = manifest(self._namespace, self._name, {HUB: pair.public, HUB_KEY: pair.secret}, {}, [], immutable=True)
        made = await self._client.create(SECRETS, self._namespace, body)
        count("create")
        return made

    def _say(self, about: Json, what: str) -> None:
        note = f"Secret {self._namespace}/{self._name} {what}: it is back with the hub's keys"
        remedy = "To give the hub other keys: stop the operator, delete the Secret, start the operator. All engines restart then"
        log.warning("hub secret restored", secret=f"{self._namespace}/{self._name}", note=note)
        self._events.emit(_named(about), warning=True, reason="SecretRestored", action="Secret", note=f"{note}. {remedy}")

    def _tell(self, problem: str, *, unusable: bool) -> None:
        if problem == self._problem:
            return
        self._problem = problem
        log.warning("hub secret", problem=problem)
        if unusable:
            about = {"metadata": {"namespace": self._namespace, "name": self._name, "uid": ""}}
            self._events.emit(_named(about), warning=True, reason="SecretUnusable", action="Secret", note=problem)


def _named(secret: Json) -> Json:
    return {"apiVersion": "v1", "kind": "Secret", "metadata": secret["metadata"]}
