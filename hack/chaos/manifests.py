"""The manifests of a run: which pools and engines there may be, and what they should be by now."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

from tests.cluster.operator_harness import ENGINES, POOLS

Json = dict[str, Any]
POOL_NAMES = ("actor", "critic", "judge")
ENGINE_NAMES = ("chat", "code", "eval", "maths", "solo", "web")
POOL_OF: dict[str, str | None] = {"chat": "actor", "code": "actor", "eval": "critic", "maths": "critic", "solo": None, "web": "judge"}
"""`spec.poolRef` is immutable, so each engine has its own."""
API_VERSION = "epochkv.io/v1alpha1"
JSON_PATCH, MERGE_PATCH = "application/json-patch+json", "application/merge-patch+json"


@dataclass(frozen=True)
class Edit:
    """One request of a user. `apply`: the whole object; `delete`; or `patch` of a child, which may be missing by now.

    Attributes:
        what: for the log.
        collection: path with a `{}` for the namespace.
    """

    what: str
    verb: str
    collection: str
    name: str
    body: Any = None
    content_type: str = MERGE_PATCH


@dataclass
class Wanted:
    """The manifests as they are after all edits so far: specs by name."""

    pools: dict[str, Json] = field(default_factory=dict)
    engines: dict[str, Json] = field(default_factory=dict)

    def manifests(self) -> list[tuple[str, Json]]:
        """Collection and object of each, pools first."""
        return [(POOLS, manifest("KVCachePool", name, spec)) for name, spec in sorted(self.pools.items())] + [
            (ENGINES, manifest("InferenceEngine", name, spec)) for name, spec in sorted(self.engines.items())
        ]


def manifest(kind: str, name: str, spec: Json) -> Json:
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": copy.deepcopy(spec)}
