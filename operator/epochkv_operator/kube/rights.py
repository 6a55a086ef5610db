"""What the operator has to be allowed, as a table: `client.py` says why, the chart grants it, `epochkv doctor` asks for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from epochkv_operator.api.base import GROUP
from epochkv_operator.kube.resources import (
    CHILDREN,
    CONFIGMAPS,
    EVENTS,
    LEASES,
    OPTIONAL,
    PODS,
    PRIMARY,
    SECRETS,
    SERVICE_ACCOUNTS,
    Resource,
)

READ: Final = ("get", "list", "watch")
KEEP: Final = ("get", "list", "watch", "create", "patch")
KEPT: Final = (CONFIGMAPS, SERVICE_ACCOUNTS)
"""Children that only go with their owner: the garbage collector deletes them."""


@dataclass(frozen=True, slots=True)
class Right:
    """One verb on one resource. `namespace` None: in the whole cluster. `name`: on this object alone; empty: on all."""

    group: str
    resource: str
    verb: str
    namespace: str | None
    name: str = ""
    subresource: str = ""

    def __str__(self) -> str:
        plural = f"{self.resource}.{self.group}" if self.group else self.resource
        what = f"{plural}/{self.subresource}" if self.subresource else plural
        where = f" in {self.namespace}" if self.namespace is not None else ""
        return f"{self.verb} {what}{f' {self.name}' if self.name else ''}{where}"


def rights(home: str, scopes: Sequence[str | None], lease: str, hub_secret: str) -> list[Right]:
    """All that an operator needs that runs in `home` and serves `scopes` (None: the whole cluster)."""
    found = [right for scope in scopes for right in _served(scope)]
    for resource, verb, name in (
        (LEASES, "get", lease),
        (LEASES, "update", lease),
        (LEASES, "create", ""),
        (SECRETS, "get", hub_secret),
        (SECRETS, "delete", hub_secret),
        (SECRETS, "create", ""),
        (EVENTS, "create", ""),
    ):
        found.append(Right(resource.group, resource.plural, verb, home, name))
    for scope in scopes:
        if scope in (None, home):  # it sees its own Lease through its watches
            found += [Right(LEASES.group, LEASES.plural, verb, scope, lease) for verb in ("list", "watch")]
    return found


def _served(scope: str | None) -> Iterable[Right]:
    def right(resource: Resource, verbs: Iterable[str], subresource: str = "") -> list[Right]:
        return [Right(resource.group, resource.plural, verb, scope, "", subresource) for verb in verbs]

    for resource in PRIMARY:
        assert resource.group == GROUP
        yield from right(resource, READ)
        yield from right(resource, ("patch",), "status")
    for resource in (*CHILDREN, *OPTIONAL):
        yield from right(resource, KEEP if resource in KEPT else (*KEEP, "delete"))
    yield from right(PODS, ("list", "watch"))
    yield from right(SECRETS, ("get", "create", "update", "delete"))
    yield from right(EVENTS, ("create",))
