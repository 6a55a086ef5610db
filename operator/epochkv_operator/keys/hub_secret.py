"""The Secret with the hub's key pair. Every engine was given the public key, so another pair restarts all of them.

While an operator leads, the pair that it read or made counts: a Secret that is deleted or changed comes back as it was. When none
runs, the Secret is all there is. So a new pair is given by stopping the operator, deleting the Secret, and starting it again.
"""

from __future__ import annotations

import asyncio
from typing import Final

import structlog

from epochkv_fence.net import KeyPair, generate_keypair
from epochkv_fence.net.keys import CredentialsError, check_key, public_of
from epochkv_operator.keys.content import decoded
from epochkv_operator.keys.secret import count, manifest
from epochkv_operator.kube.client import AlreadyExists, ApiError, Json, KubeClient, NotFound
from epochkv_operator.kube.events import EventRecorder
from epochkv_operator.kube.resources import SECRETS

log = structlog.get_logger(__name__)
PUBLIC: Final = "hub.pub"
KEY: Final = "hub.key"
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
        secret = decoded(found).get(KEY, "")
        try:
            check_key(KEY, secret)
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
        wrong = [name for name, value in ((PUBLIC, pair.public), (KEY, pair.secret)) if fields.get(name) != value]
        if wrong:  # immutable, so somebody has made it again; it is not changed, but replaced
            await self._client.delete(SECRETS, self._namespace, self._name, found["metadata"]["uid"])
            count("delete")
            about = await self._create(pair)
            self._say(about, f"was changed by somebody else ({', '.join(wrong)})")

    async def _create(self, pair: KeyPair) -> Json:
        body = manifest(self._namespace, self._name, {PUBLIC: pair.public, KEY: pair.secret}, {}, [], immutable=True)
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
