"""What the operator's service account may do, against what it needs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from epochkv_fence.doctor.finding import CannotLook, Finding, Say
from epochkv_operator.doctor.cluster import Cluster
from epochkv_operator.doctor.operators import Operator, find_operators
from epochkv_operator.kube.client import Json, NotFound
from epochkv_operator.kube.resources import Right, rights
from epochkv_operator.settings import Settings

AUTHORIZATION: Final = "/apis/authorization.k8s.io/v1"
AT_ONCE: Final = 16
SHOWN: Final = 6


async def look_at_access(cluster: Cluster) -> list[Finding]:
    found = []
    for operator in await find_operators(cluster):
        needed = rights(operator.namespace, operator.scopes, operator.lease_name, Settings.hub_secret)
        found += judge_access(operator, await _missing(cluster, operator, needed), len(needed))
    if not found:
        raise CannotLook("no operator was found, so nobody's rights can be looked at")
    return found


def judge_access(operator: Operator, missing: Sequence[Right], num_needed: int) -> list[Finding]:
    say = Say("rbac", operator.service_account)
    if not missing:
        return [say.ok(f"it has all {num_needed} rights that the operator needs")]
    more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
    text = f"it lacks {len(missing)} of {num_needed} rights: {', '.join(map(str, missing[:SHOWN]))}{more}"
    return [say.wrong(text, operator.restored)]


async def _missing(cluster: Cluster, operator: Operator, needed: Sequence[Right]) -> list[Right]:
    """Asked of the API server for that account; for ourselves, anybody may ask."""
    myself = await cluster.user() == operator.service_account
    gate = asyncio.Semaphore(AT_ONCE)

    async def allowed(right: Right) -> bool:
        async with gate:
            return await _allowed(cluster, right, "" if myself else operator.service_account)

    answers = await asyncio.gather(*(allowed(right) for right in needed))
    return [right for right, answer in zip(needed, answers, strict=True) if not answer]


async def _allowed(cluster: Cluster, right: Right, account: str) -> bool:
    kind = "SubjectAccessReview" if account else "SelfSubjectAccessReview"
    body = {"apiVersion": "authorization.k8s.io/v1", "kind": kind, "spec": _spec(right, account)}
    try:
        answer = await cluster.request("POST", f"{AUTHORIZATION}/{kind.lower()}s", body)
    except NotFound as error:
        raise CannotLook("the API server has no access reviews") from error
    except CannotLook as error:
        if account:
            home = account.split(":")[2]
            hint = f"kubectl -n {home} exec deployment/epochkv-operator -- epochkv doctor   # it may ask for itself"
            raise CannotLook(f"this user may not ask what {account} may do", hint) from error
        raise
    return bool((answer.get("status") or {}).get("allowed"))


def _spec(right: Right, account: str) -> Json:
    attributes = {
        "group": right.group,
        "resource": right.resource,
        "subresource": right.subresource,
        "verb": right.verb,
        "namespace": right.namespace or "",
        "name": right.name,
    }
    spec: Json = {"resourceAttributes": {key: value for key, value in attributes.items() if value}}
    if account:
        _, _, namespace, _ = account.split(":")
        spec |= {"user": account, "groups": ["system:serviceaccounts", f"system:serviceaccounts:{namespace}", "system:authenticated"]}
    return spec
