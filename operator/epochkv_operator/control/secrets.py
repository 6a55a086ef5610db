"""Key material: the hub's CURVE key pair and one Secret per pool with its client key pair and root secret.

Two operators that race end up with one content: the second create fails and reads, and every change is a
compare-and-swap. A pool's Secret is bound to the pool's uid by its owner reference; a namesake's leftover is deleted, by
uid, before a new one is made, so that a recreated pool never inherits names or keys. A deleted Secret comes back with the
same content while this process remembers it: running engines hold the old keys.

A pool's Secret is not `immutable`: the kubelet neither refreshes immutable Secrets in mounted volumes nor would a rotated
key reach running engines. What must not change is guarded here: nothing but `client.*`, `previous.pub` and `generation`
is ever replaced. Rotation is three writes, and each of them alone leaves every engine with a key that works:

1. The hub accepts the new pair, too (in memory), *before* anybody can have it.
2. One write puts the new pair into the Secret, and the public key of the older one beside it as `previous.pub`, so that
   whoever leads next accepts both.
3. When no live boot has used the older key for a while, one write removes `previous.pub`; then the hub forgets the key.
"""

from __future__ import annotations

import base64
import secrets
from dataclasses import dataclass, field, replace

import structlog

from epochkv_fence.net import CredentialsError, KeyPair, generate_keypair
from epochkv_fence.net.keys import check_key
from epochkv_operator import metrics
from epochkv_operator.kube.client import AlreadyExists, Forbidden, Invalid, Json, KubeClient, NotFound
from epochkv_operator.kube.resources import MANAGED_BY, POOL_LABEL, POOLS, SECRETS

log = structlog.get_logger(__name__)


class SecretConflict(Exception):
    """A Secret of that name exists and is not ours to replace, or lacks keys."""


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
    """Public key of the pair that the Secret was made with, which tells whether engines have the Secret's root secret."""

    @property
    def accepted(self) -> tuple[str, ...]:
        """Public keys, the newest first."""
        return (self.client.public,) if self.previous is None else (self.client.public, self.previous)


def fence_secret_name(pool: str) -> str:
    return f"{pool}-fence"


async def hub_keys(client: KubeClient, namespace: str, name: str) -> KeyPair:
    """The hub's key pair, made on first use.

    Raises:
        SecretConflict: the Secret exists without usable keys.
        ApiError
    """
    try:
        found = await client.get(SECRETS, namespace, name)
    except NotFound:
        pair = generate_keypair()
        body = _secret(namespace, name, {"hub.pub": pair.public, "hub.key": pair.secret}, {}, [])
        try:
            await client.create(SECRETS, namespace, body)
        except AlreadyExists:
            found = await client.get(SECRETS, namespace, name)
        else:
            metrics.API_WRITES.labels(kind="Secret", operation="create").inc()
            log.info("hub key pair created", secret=f"{namespace}/{name}")
            return pair
    try:
        return KeyPair(_field(found, "hub.pub"), _field(found, "hub.key"))
    except CredentialsError as error:
        raise SecretConflict(f"Secret {namespace}/{name}: {error}") from error


class FenceSecrets:
    """The pools' Secrets. Remembers contents by pool uid."""

    def __init__(self, client: KubeClient, hub_public: str) -> None:
        self._client = client
        self._hub_public = hub_public
        self._known: dict[str, FenceKeys] = {}
        self._conflicts: set[str] = set()
        self._refusals: dict[str, str] = {}
        self._uids: dict[tuple[str, str], str] = {}
        self._drawn: dict[str, KeyPair] = {}

    def known(self, pool_uid: str) -> FenceKeys | None:
        return self._known.get(pool_uid)

    def decided(self, pool_uid: str) -> bool:
        """Whether the pool's keys are known, or known to be impossible to have."""
        return pool_uid in self._known or pool_uid in self._conflicts

    def refusal(self, pool_uid: str) -> str | None:
        """Why the pool has no keys, in words; None when it has some or was not looked at yet."""
        return None if pool_uid in self._known else self._refusals.get(pool_uid)

    def forget(self, namespace: str, pool: str) -> None:
        """The pool is gone, or another one of its name has come: nobody may ever be given its keys again."""
        uid = self._uids.pop((namespace, pool), "")
        self._known.pop(uid, None)
        self._drawn.pop(uid, None)
        self._conflicts.discard(uid)
        self._refusals.pop(uid, None)

    async def ensure(self, pool: Json) -> FenceKeys:
        """Make sure the pool's Secret exists, is bound to this pool's uid and names this hub.

        Raises:
            SecretConflict: the Secret belongs to somebody else.
            ApiError
        """
        uid, place = pool["metadata"]["uid"], (pool["metadata"]["namespace"], pool["metadata"]["name"])
        if self._uids.get(place) != uid:
            self.forget(*place)
            self._uids[place] = uid
        self._refusals.pop(uid, None)
        try:
            self._remember(uid, await self._ensure(pool))
        except SecretConflict as error:
            self._conflicts.add(uid)
            self._refusals[uid] = str(error)
            raise
        except (Forbidden, Invalid) as error:
            name = f"{pool['metadata']['namespace']}/{fence_secret_name(pool['metadata']['name'])}"
            self._refusals[uid] = f"Secret {name} with the pool's keys cannot be read or made: {error.message}"
            raise
        self._conflicts.discard(uid)
        return self._known[uid]

    async def _ensure(self, pool: Json) -> FenceKeys:
        metadata = pool["metadata"]
        namespace, uid, name = metadata["namespace"], metadata["uid"], fence_secret_name(metadata["name"])
        try:
            found = await self._client.get(SECRETS, namespace, name)
        except NotFound:
            return await self._create(pool, self._known.get(uid))
        owners = found["metadata"].get("ownerReferences") or []
        owner = next((ref for ref in owners if (ref.get("kind"), ref.get("name")) == (POOLS.kind, metadata["name"])), None)
        if owner is None:
            raise SecretConflict(f"Secret {namespace}/{name} exists and is not this operator's; delete it, the pool needs that name")
        if owner["uid"] != uid:
            await self._delete(found, "it belonged to a deleted pool of the same name")
            return await self._create(pool, None)
        keys = _parse(found)
        if keys.hub_public != self._hub_public:
            changed = replace(keys, hub_public=self._hub_public)
            if not found.get("immutable"):
                return await self._replace(found, changed, "the hub has a new key pair")
            await self._delete(found, "the hub has a new key pair")
            return await self._create(pool, changed)
        return keys

    def draw(self, pool_uid: str) -> None:
        """Draw the pair that the next rotation brings; it stays the same one until it is in the Secret."""
        self._drawn.setdefault(pool_uid, generate_keypair())

    def accepted(self, pool_uid: str) -> tuple[str, ...]:
        """Public keys that the hub has to accept, the newest first."""
        keys, drawn = self._known[pool_uid], self._drawn.get(pool_uid)
        return keys.accepted if drawn is None else (drawn.public, keys.client.public)

    async def rotate(self, pool: Json, generation: int) -> FenceKeys:
        """Put the drawn pair into the Secret, with the older public key beside it. The hub must accept both already.

        Raises:
            SecretConflict: the Secret cannot be changed; the text says what to do.
            ApiError: also when somebody else has changed it meanwhile.
        """
        metadata = pool["metadata"]
        namespace, uid, name = metadata["namespace"], metadata["uid"], fence_secret_name(metadata["name"])
        found = await self._client.get(SECRETS, namespace, name)
        keys = _parse(found)
        if keys.generation >= generation or keys.previous is not None:
            self._drawn.pop(uid, None)
            self._known[uid] = keys
            return keys  # done, perhaps by a write of ours whose answer was lost; or one rotation is still under way
        if found.get("immutable"):
            raise SecretConflict(
                f"Secret {namespace}/{name} was made by an older operator and cannot be changed: delete it, the operator makes it again"
                " with the same keys while it runs, and rotates them then; pods that mounted the deleted one see new keys after a restart"
            )
        rotated = replace(keys, client=self._drawn[uid], generation=generation, previous=keys.client.public)
        self._remember(uid, await self._replace(found, rotated, f"key generation {generation}"))
        return rotated

    async def retire(self, pool: Json) -> FenceKeys:
        """Take the older public key out of the Secret.

        Raises:
            ApiError
        """
        metadata = pool["metadata"]
        found = await self._client.get(SECRETS, metadata["namespace"], fence_secret_name(metadata["name"]))
        keys = _parse(found)
        if keys.previous is not None:
            keys = await self._replace(found, replace(keys, previous=None), "nobody uses the older key any more")
        self._remember(metadata["uid"], keys)
        return keys

    def _remember(self, uid: str, keys: FenceKeys) -> None:
        self._known[uid] = keys
        if keys.previous is not None:  # a rotation is in the Secret, ours or another operator's
            self._drawn.pop(uid, None)

    async def _replace(self, found: Json, keys: FenceKeys, why: str) -> FenceKeys:
        """Compare-and-swap of the whole content: `found` carries its resourceVersion."""
        metadata = found["metadata"]
        await self._client.replace(SECRETS, metadata["namespace"], {**found, "data": _encoded(_content(keys))})
        metrics.API_WRITES.labels(kind="Secret", operation="replace").inc()
        log.info("fence secret changed", secret=f"{metadata['namespace']}/{metadata['name']}", reason=why, generation=keys.generation)
        return keys

    async def _create(self, pool: Json, keys: FenceKeys | None) -> FenceKeys:
        metadata = pool["metadata"]
        namespace, name = metadata["namespace"], fence_secret_name(metadata["name"])
        if keys is None:
            pair = generate_keypair()
            keys = FenceKeys(self._hub_public, pair, secrets.token_hex(32), pool["spec"].get("keys", {}).get("generation") or 0)
            made, again = replace(keys, first=pair.public), False
        else:
            made, again = replace(keys, hub_public=self._hub_public), True
        content = _content(made)
        owner = {
            "apiVersion": POOLS.api_version,
            "kind": POOLS.kind,
            "name": metadata["name"],
            "uid": metadata["uid"],
            "controller": True,
            "blockOwnerDeletion": False,
        }
        body = _secret(namespace, name, content, {POOL_LABEL: metadata["name"]}, [owner], immutable=False)
        await self._client.create(SECRETS, namespace, body)
        metrics.API_WRITES.labels(kind="Secret", operation="create").inc()
        log.info(
            "fence secret created",
            secret=f"{namespace}/{name}",
            pool_uid=metadata["uid"],
            same_content=again,
        )
        return made

    async def _delete(self, found: Json, why: str) -> None:
        metadata = found["metadata"]
        await self._client.delete(SECRETS, metadata["namespace"], metadata["name"], metadata["uid"])
        metrics.API_WRITES.labels(kind="Secret", operation="delete").inc()
        log.info("fence secret deleted", secret=f"{metadata['namespace']}/{metadata['name']}", reason=why)


def _secret(
    namespace: str, name: str, content: dict[str, str], labels: dict[str, str], owners: list[Json], *, immutable: bool = True
) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": {"app.kubernetes.io/managed-by": MANAGED_BY, "app.kubernetes.io/part-of": "epochkv", **labels},
            "ownerReferences": owners,
        },
        "type": "Opaque",
        "immutable": immutable,
        "data": _encoded(content),
    }


def _encoded(content: dict[str, str]) -> dict[str, str]:
    return {key: base64.b64encode(value.encode()).decode() for key, value in content.items()}


def _content(keys: FenceKeys) -> dict[str, str]:
    """What a pool's Secret holds; `hub.pub`, `client.*` and `root.secret` are what engines and trainers read."""
    content = {
        "hub.pub": keys.hub_public,
        "client.pub": keys.client.public,
        "client.key": keys.client.secret,
        "root.secret": keys.root_secret,
        "generation": str(keys.generation),
        "first.pub": keys.first,
    }
    return content if keys.previous is None else {**content, "previous.pub": keys.previous}


def _field(secret: Json, key: str) -> str:
    encoded = (secret.get("data") or {}).get(key)
    name = f"{secret['metadata']['namespace']}/{secret['metadata']['name']}"
    if not encoded:
        raise SecretConflict(f"Secret {name} has no {key}; delete it and the operator makes a new one")
    return base64.b64decode(encoded).decode()


def _parse(secret: Json) -> FenceKeys:
    name = f"{secret['metadata']['namespace']}/{secret['metadata']['name']}"
    data = secret.get("data") or {}
    try:
        client = KeyPair(_field(secret, "client.pub"), _field(secret, "client.key"))
        previous = _field(secret, "previous.pub") if "previous.pub" in data else None
        if previous is not None:
            check_key("previous.pub", previous)
        generation = int(_field(secret, "generation")) if "generation" in data else 0
    except ValueError as error:
        raise SecretConflict(f"Secret {name}: {error}; delete it and the operator makes a new one") from error
    first = _field(secret, "first.pub") if "first.pub" in data else client.public
    return FenceKeys(_field(secret, "hub.pub"), client, _field(secret, "root.secret"), generation, previous, first)
