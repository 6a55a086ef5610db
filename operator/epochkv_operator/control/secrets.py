"""Key material: the hub's CURVE key pair and one Secret per pool with its client key pair and root secret.

Secrets are created, never applied or changed (they are immutable): two operators that race end up with one content,
because the second create fails and reads. A pool's Secret is bound to the pool's uid by its owner reference; a
namesake's leftover is deleted, by uid, before a new one is made, so that a recreated pool never inherits names or
keys. A deleted Secret comes back with the same content while this process remembers it: running engines hold the old
keys.
"""

from __future__ import annotations

import base64
import secrets
from dataclasses import dataclass, field

import structlog

from epochkv_fence.transport import CredentialsError, HubKeys, KeyPair, generate_keypair
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


def fence_secret_name(pool: str) -> str:
    return f"{pool}-fence"


async def hub_keys(client: KubeClient, namespace: str, name: str) -> HubKeys:
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
            return HubKeys(pair.public, pair.secret)
    try:
        return HubKeys(_field(found, "hub.pub"), _field(found, "hub.key"))
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
            self._known[uid] = await self._ensure(pool)
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
            await self._delete(found, "the hub has a new key pair")
            return await self._create(pool, keys)
        return keys

    async def _create(self, pool: Json, keys: FenceKeys | None) -> FenceKeys:
        metadata = pool["metadata"]
        namespace, name = metadata["namespace"], fence_secret_name(metadata["name"])
        made = FenceKeys(self._hub_public, keys.client if keys else generate_keypair(), keys.root_secret if keys else secrets.token_hex(32))
        content = {
            "hub.pub": made.hub_public,
            "client.pub": made.client.public,
            "client.key": made.client.secret,
            "root.secret": made.root_secret,
        }
        owner = {
            "apiVersion": POOLS.api_version,
            "kind": POOLS.kind,
            "name": metadata["name"],
            "uid": metadata["uid"],
            "controller": True,
            "blockOwnerDeletion": False,
        }
        await self._client.create(SECRETS, namespace, _secret(namespace, name, content, {POOL_LABEL: metadata["name"]}, [owner]))
        metrics.API_WRITES.labels(kind="Secret", operation="create").inc()
        log.info(
            "fence secret created",
            secret=f"{namespace}/{name}",
            pool_uid=metadata["uid"],
            same_content=keys is not None,
        )
        return made

    async def _delete(self, found: Json, why: str) -> None:
        metadata = found["metadata"]
        await self._client.delete(SECRETS, metadata["namespace"], metadata["name"], metadata["uid"])
        metrics.API_WRITES.labels(kind="Secret", operation="delete").inc()
        log.info("fence secret deleted", secret=f"{metadata['namespace']}/{metadata['name']}", reason=why)


def _secret(namespace: str, name: str, content: dict[str, str], labels: dict[str, str], owners: list[Json]) -> Json:
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
        "immutable": True,
        "data": {key: base64.b64encode(value.encode()).decode() for key, value in content.items()},
    }


def _field(secret: Json, key: str) -> str:
    encoded = (secret.get("data") or {}).get(key)
    name = f"{secret['metadata']['namespace']}/{secret['metadata']['name']}"
    if not encoded:
        raise SecretConflict(f"Secret {name} has no {key}; delete it and the operator makes a new one")
    return base64.b64decode(encoded).decode()


def _parse(secret: Json) -> FenceKeys:
    try:
        client = KeyPair(_field(secret, "client.pub"), _field(secret, "client.key"))
    except CredentialsError as error:
        name = f"{secret['metadata']['namespace']}/{secret['metadata']['name']}"
        raise SecretConflict(f"Secret {name}: {error}; delete it and the operator makes a new one") from error
    return FenceKeys(_field(secret, "hub.pub"), client, _field(secret, "root.secret"))
