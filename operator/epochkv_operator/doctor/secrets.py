"""The hub's Secret and those of the pools: whether their fields fit together, and to the pool. No value is ever shown."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator
from typing import Final

from epochkv_fence.connection import ROOT_SECRET_BYTES
from epochkv_fence.doctor.finding import CannotLook, Finding, Say
from epochkv_fence.net.keys import CredentialsError, KeyPair, check_key
from epochkv_operator.doctor.cluster import Cluster, each, gathered, place
from epochkv_operator.doctor.operators import Operator, find_operators
from epochkv_operator.kube.client import Json
from epochkv_operator.kube.resources import CONFIGMAPS
from epochkv_operator.planning.names import component_name
from epochkv_operator.settings import Settings

FIELDS: Final = ("hub.pub", "client.pub", "client.key", "root.secret", "generation", "check")


async def look_at_secrets(cluster: Cluster) -> list[Finding]:
    try:
        operators = await find_operators(cluster)
    except CannotLook:
        operators = []
    hubs = [await cluster.secret(operator.namespace, Settings.hub_secret) for operator in operators]
    found = [finding for operator, hub in zip(operators, hubs, strict=True) for finding in judge_hub_secret(operator, hub)]
    publics = {content.get("hub.pub", "") for content in map(content_of, hubs) if content}

    async def look(pool: Json) -> list[Finding]:
        namespace, name = pool["metadata"]["namespace"], pool["metadata"]["name"]
        secret = await cluster.secret(namespace, component_name(name, "fence"))
        config = await cluster.get(CONFIGMAPS, namespace, component_name(name, "connection"))
        return [*judge_secret(pool, secret, publics), *judge_connection(pool, config)]

    found += await each(await cluster.pools(), look, "secrets", place)
    return gathered(found, "secrets", "the fields of {} Secrets and ConfigMaps fit together")


def judge_hub_secret(operator: Operator, secret: Json | None) -> list[Finding]:
    """The hub's key pair: without it, a new leader draws a new one, and every engine has to restart."""
    say = Say("secrets", f"Secret {operator.namespace}/{Settings.hub_secret}")
    restart = f"kubectl -n {operator.namespace} rollout restart deployment/epochkv-operator"
    if secret is None:
        text = "it is gone: the running operator serves on with what it remembers, and the next one draws new keys"
        return [say.wrong(text, f"{restart}   # makes new keys now; engines roll")]
    content = content_of(secret)
    try:
        KeyPair(content.get("hub.pub", ""), content.get("hub.key", ""))
    except CredentialsError as error:
        again = f"kubectl -n {operator.namespace} delete secret {Settings.hub_secret} && {restart}"
        return [say.wrong(f"hub.pub and hub.key do not fit: {error}", f"{again}   # new keys; engines roll")]
    return [say.ok("its key pair fits")]


def judge_secret(pool: Json, secret: Json | None, hub_publics: set[str]) -> list[Finding]:
    """A pool's Secret. `hub_publics`: the keys that hubs have; empty: not known."""
    namespace, name = pool["metadata"]["namespace"], component_name(pool["metadata"]["name"], "fence")
    say = Say("secrets", f"Secret {namespace}/{name}")
    again = remade(pool)
    if secret is None:
        return [
            say.wrong(
                "it does not exist: engines of the pool cannot start", f"kubectl -n {namespace} describe kvp {pool['metadata']['name']}"
            )
        ]
    owners = secret["metadata"].get("ownerReferences") or []
    if not any(owner.get("uid") == pool["metadata"]["uid"] for owner in owners):
        return [say.wrong("it is not this pool's, but somebody else's or of a deleted namesake", again)]
    problems = list(_disagreements(pool, content_of(secret), hub_publics))
    return [say.wrong(problem, again) for problem in problems] or [say.ok("its fields fit together")]


def remade(pool: Json) -> str:
    """The command that has a pool's Secret made again. Secrets are not watched, so the operator is told to look at the pool."""
    namespace, name = pool["metadata"]["namespace"], pool["metadata"]["name"]
    delete = f"kubectl -n {namespace} delete secret {component_name(name, 'fence')}"
    look = f"kubectl -n {namespace} annotate kvp {name} epochkv.io/look-again=$(date +%s) --overwrite"
    return f"{delete} && {look}   # the operator makes it again with the keys that it remembers"


def judge_connection(pool: Json, config: Json | None) -> list[Finding]:
    """`connection.json`, which engines and trainers are given."""
    metadata, status = pool["metadata"], pool.get("status") or {}
    namespace, name = metadata["namespace"], component_name(metadata["name"], "connection")
    say = Say("secrets", f"ConfigMap {namespace}/{name}")
    again = f"kubectl -n {namespace} delete configmap {name}   # the operator makes it again"
    if config is None:
        return [say.wrong("it does not exist", f"kubectl -n {namespace} describe kvp {metadata['name']}")]
    try:
        content = json.loads((config.get("data") or {}).get("connection.json", ""))
        uid, endpoint = content["pool"]["uid"], content["hub"]["endpoint"]
    except (ValueError, KeyError, TypeError) as error:
        return [say.wrong(f"its connection.json cannot be read: {type(error).__name__}: {error}", again)]
    if uid != metadata["uid"]:
        return [say.wrong(f"it names the uid {uid}, and the pool has {metadata['uid']}", again)]
    told = (status.get("endpoints") or {}).get("hub")
    if told and endpoint != told:
        return [say.wrong(f"it names the hub {endpoint}, and status.endpoints.hub is {told}", again)]
    return [say.ok("it names the pool and its hub")]


def content_of(secret: Json | None) -> dict[str, str]:
    """Decoded fields; those that are no text are left out."""
    found = {}
    for key, value in ((secret or {}).get("data") or {}).items():
        try:
            found[key] = base64.b64decode(value or "", validate=True).decode()
        except (binascii.Error, UnicodeError):
            continue
    return found


def _disagreements(pool: Json, content: dict[str, str], hub_publics: set[str]) -> Iterator[str]:
    missing = [field for field in FIELDS[:4] if not content.get(field)]
    if missing:
        yield f"{', '.join(missing)} missing or no text"
        return
    try:
        KeyPair(content["client.pub"], content["client.key"])
    except CredentialsError as error:
        yield f"client.pub and client.key do not fit: {error}"
    for field in ("hub.pub", "previous.pub"):
        try:
            if field in content:
                check_key(field, content[field])
        except CredentialsError as error:
            yield str(error)
    if hub_publics and content["hub.pub"] not in hub_publics:
        yield "hub.pub is not the key of the hub, so engines that read it cannot reach it"
    try:
        fits = len(bytes.fromhex(content["root.secret"].strip())) == ROOT_SECRET_BYTES
    except ValueError:
        fits = False
    if not fits:
        yield f"root.secret is not {2 * ROOT_SECRET_BYTES} hex digits: engines cannot name KV with it"
    yield from _generations(pool, content)


def _generations(pool: Json, content: dict[str, str]) -> Iterator[str]:
    asked = ((pool.get("spec") or {}).get("keys") or {}).get("generation") or 0
    known = ((pool.get("status") or {}).get("keys") or {}).get("generation")
    text = content.get("generation", "0")
    if not text.isdecimal():
        yield f"generation is {text!r}, no number"
    elif int(text) > asked:
        yield f"generation is {text}, and spec.keys.generation asks for {asked}"
    elif known is not None and int(text) < known:
        yield f"generation is {text}, and the hub has taken {known} already"
