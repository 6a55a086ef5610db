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
from epochkv_operator.api.base import MANAGED_BY, POOL_LABEL
from epochkv_operator.kube.client import AlreadyExists, Forbidden, Invalid, Json, KubeClient, NotFound
from epochkv_operator.kube.resources import POOLS, SECRETS
from epochkv_operator.planning.names import component_name

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


@dataclass
class _Pool:
    """What is known of one pool's Secret."""

    place: tuple[str, str]
    """Namespace and name of the pool."""
    keys: FenceKeys | None = None
    refusal: str | None = None
    """Why there are no keys, in words."""
    conflict: bool = False
    """The Secret is somebody else's: another try does not help."""
    drawn: KeyPair | None = None
    """The pair that the next rotation brings; it stays the same one until it is in the Secret."""


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
            _count("create")
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
        self._pools: dict[str, _Pool] = {}

    def known(self, pool_uid: str) -> FenceKeys | None:
        pool = self._pools.get(pool_uid)
        return pool.keys if pool is not None else None

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

    async def ensure(self, pool: Json) -> FenceKeys:
        """Make sure the pool's Secret exists, is bound to this pool's uid and names this hub.

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
            keys = self._remember(known, await self._ensure(pool, known.keys))
        except SecretConflict as error:
            known.conflict, known.refusal = True, str(error)
            raise
        except (Forbidden, Invalid) as error:
            known.refusal = f"Secret {'/'.join(_place(pool))} with the pool's keys cannot be read or made: {error.message}"
            raise
        known.conflict = False
        return keys

    async def _ensure(self, pool: Json, known: FenceKeys | None) -> FenceKeys:
        metadata = pool["metadata"]
        namespace, name = _place(pool)
        try:
            found = await self._client.get(SECRETS, namespace, name)
        except NotFound:
            return await self._create(pool, known)
        owners = found["metadata"].get("ownerReferences") or []
        owner = next((ref for ref in owners if (ref.get("kind"), ref.get("name")) == (POOLS.kind, metadata["name"])), None)
        if owner is None:
            raise SecretConflict(f"Secret {namespace}/{name} exists and is not this operator's; delete it, the pool needs that name")
        if owner["uid"] != metadata["uid"]:
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
        keys = _parse(found)
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
        return self._remember(known, await self._replace(found, rotated, f"key generation {generation}"))

    async def retire(self, pool: Json) -> FenceKeys:
        """Take the older public key out of the Secret.

        Raises:
            ApiError
        """
        found = await self._client.get(SECRETS, *_place(pool))
        keys = _parse(found)
        if keys.previous is not None:
            keys = await self._replace(found, replace(keys, previous=None), "nobody uses the older key any more")
        return self._remember(self._pools[pool["metadata"]["uid"]], keys)

    @staticmethod
    def _remember(pool: _Pool, keys: FenceKeys) -> FenceKeys:
        pool.keys = keys
        if keys.previous is not None:  # a rotation is in the Secret, ours or another operator's
            pool.drawn = None
        return keys

    async def _replace(self, found: Json, keys: FenceKeys, why: str) -> FenceKeys:
        """Compare-and-swap of the whole content: `found` carries its resourceVersion."""
        metadata = found["metadata"]
        await self._client.replace(SECRETS, metadata["namespace"], {**found, "data": _encoded(_content(keys))})
        _count("replace")
        log.info("fence secret changed", secret=f"{metadata['namespace']}/{metadata['name']}", reason=why, generation=keys.generation)
        return keys

    async def _create(self, pool: Json, keys: FenceKeys | None) -> FenceKeys:
        metadata, (namespace, name) = pool["metadata"], _place(pool)
        if keys is None:
            pair = generate_keypair()
            generation = pool["spec"].get("keys", {}).get("generation") or 0
            made = FenceKeys(self._hub_public, pair, secrets.token_hex(32), generation, first=pair.public)
        else:
            made = replace(keys, hub_public=self._hub_public)
        owner = {
            "apiVersion": POOLS.api_version,
            "kind": POOLS.kind,
            "name": metadata["name"],
            "uid": metadata["uid"],
            "controller": True,
            "blockOwnerDeletion": False,
        }
        body = _secret(namespace, name, _content(made), {POOL_LABEL: metadata["name"]}, [owner], immutable=False)
        await self._client.create(SECRETS, namespace, body)
        _count("create")
        log.info("fence secret created", secret=f"{namespace}/{name}", pool_uid=metadata["uid"], same_content=keys is not None)
        return made

    async def _delete(self, found: Json, why: str) -> None:
        metadata = found["metadata"]
        await self._client.delete(SECRETS, metadata["namespace"], metadata["name"], metadata["uid"])
        _count("delete")
        log.info("fence secret deleted", secret=f"{metadata['namespace']}/{metadata['name']}", reason=why)


def _place(pool: Json) -> tuple[str, str]:
    """Namespace and name of a pool's Secret."""
    return pool["metadata"]["namespace"], component_name(pool["metadata"]["name"], "fence")


def _count(operation: str) -> None:
    metrics.API_WRITES.labels(kind="Secret", operation=operation).inc()


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
