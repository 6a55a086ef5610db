"""Random valid edits of pools and engines, and of what the operator made of them. A seed gives the same edits in the same order.

Nothing here asks the cluster: the manifests are known, so at the end a fresh install of them can be made.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from hack.chaos.manifests import ENGINE_NAMES, POOL_NAMES, POOL_OF, Edit, Json, Wanted, manifest
from hack.chaos.meddling import delete_child, edit_child
from tests.cluster.operator_harness import ENGINES, POOLS

LEASE_SECONDS = (1, 3)


class Editor:
    """Draws edits; `wanted` follows them."""

    def __init__(self, seed: object) -> None:
        self._random = random.Random(f"{seed}:edits")
        self.wanted = Wanted()
        self._kinds: dict[Callable[[], Edit | list[Edit] | None], int] = {
            self._new: 10,
            self._delete: 4,
            self._recreate: 3,
            self._bump: 10,
            self._tiers: 16,
            self._pool_field: 8,
            self._rotate: 4,
            self._scale: 10,
            self._engine_field: 14,
            lambda: delete_child(self._random, self.wanted): 10,
            lambda: edit_child(self._random, self.wanted): 14,
        }

    def first(self) -> list[Edit]:
        """Edits that make most of the world."""
        return [self._make_pool(name) for name in POOL_NAMES[:2]] + [self._make_engine(name) for name in ENGINE_NAMES[:4]]

    def next(self) -> list[Edit]:
        """One edit more, or two that belong together; `wanted` has them already."""
        while True:
            kind = self._random.choices(list(self._kinds), list(self._kinds.values()))[0]
            if (found := kind()) is not None:
                return [found] if isinstance(found, Edit) else found

    def pause_seconds(self) -> float:
        """Between this edit and the next: mostly short, so that they meet each other's work."""
        return self._random.choice((0.0, 0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0))

    # ---- pools and engines come and go ----

    def _new(self) -> Edit | None:
        missing = [name for name in (*POOL_NAMES, *ENGINE_NAMES) if name not in self.wanted.pools and name not in self.wanted.engines]
        if not missing:
            return None
        name = self._random.choice(missing)
        return self._make_pool(name) if name in POOL_NAMES else self._make_engine(name)

    def _make_pool(self, name: str) -> Edit:
        rng = self._random
        spec: Json = {"resetEpoch": rng.choice((0, 0, 1, 3)), "reset": {"leaseSeconds": LEASE_SECONDS[0]}}
        tiers = rng.choice((("local",), ("distributed",), ("local", "distributed")))
        spec |= {tier: {"capacity": "64Mi"} if tier == "local" else distributed(self._random) for tier in tiers}
        if rng.random() < 0.3:
            spec["keys"] = {"generation": 1}
        self.wanted.pools[name] = spec
        return self._apply_pool(name, "create")

    def _make_engine(self, name: str) -> Edit:
        spec: Json = {"model": {"name": self._random.choice(("tiny", "small"))}, "replicas": self._random.randrange(4)}
        if (pool := POOL_OF[name]) is not None:
            spec["poolRef"] = {"name": pool}
        self.wanted.engines[name] = spec
        return self._apply_engine(name, "create")

    def _delete(self) -> Edit | None:
        both = sorted((*self.wanted.pools, *self.wanted.engines))
        return self._drop(self._random.choice(both)) if len(both) > 3 else None

    def _recreate(self) -> list[Edit] | None:
        """Delete, and make anew before the garbage collector is through."""
        both = sorted((*self.wanted.pools, *self.wanted.engines))
        if not both:
            return None
        name = self._random.choice(both)
        return [self._drop(name), self._make_pool(name) if name in POOL_NAMES else self._make_engine(name)]

    def _drop(self, name: str) -> Edit:
        pool = self.wanted.pools.pop(name, None) is not None
        self.wanted.engines.pop(name, None)
        return Edit(f"delete {name}", "delete", POOLS if pool else ENGINES, name)

    # ---- fields ----

    def _pool(self) -> tuple[str, Json] | None:
        return self._random.choice(sorted(self.wanted.pools.items(), key=lambda item: item[0])) if self.wanted.pools else None

    def _bump(self) -> Edit | None:
        if (chosen := self._pool()) is None:
            return None
        name, spec = chosen
        spec["resetEpoch"] += self._random.choice((1, 1, 1, 5))
        return self._apply_pool(name, f"resetEpoch {spec['resetEpoch']}")

    def _rotate(self) -> Edit | None:
        if (chosen := self._pool()) is None:
            return None
        name, spec = chosen
        spec["keys"] = {"generation": spec.get("keys", {}).get("generation", 0) + 1}
        return self._apply_pool(name, f"keys.generation {spec['keys']['generation']}")

    def _tiers(self) -> Edit | None:
        """Add or remove a tier; L2 may not change its kind in place."""
        if (chosen := self._pool()) is None:
            return None
        name, spec = chosen
        tier = self._random.choice(("local", "distributed"))
        other = "distributed" if tier == "local" else "local"
        if tier in spec and other in spec:
            del spec[tier]
            if tier == "distributed":
                spec["reset"].pop("reclaimPolicy", None)
            return self._apply_pool(name, f"without {tier}")
        if tier in spec:
            return None
        spec[tier] = {"capacity": "128Mi"} if tier == "local" else distributed(self._random)
        if spec["reset"].get("reclaimPolicy") == "RemoveAll":
            del spec["reset"]["reclaimPolicy"]
        return self._apply_pool(name, f"with {tier}")

    def _pool_field(self) -> Edit | None:
        if (chosen := self._pool()) is None:
            return None
        name, spec = chosen
        rng, mooncake = self._random, spec.get("distributed", {}).get("mooncake")
        what = rng.choice(("lease", "reclaim", "policy", "capacity", "stores", "stores", "segment", "image"))
        if what == "lease":
            spec["reset"]["leaseSeconds"] = min(LEASE_SECONDS[1], spec["reset"]["leaseSeconds"] + 1)
        elif what == "reclaim":
            spec["reset"]["reclaimPolicy"] = rng.choice(("Delete", "Retain"))
        elif what == "policy":
            spec["networkPolicy"] = {"mode": rng.choice(("Enabled", "Disabled"))}
        elif what == "capacity" and "local" in spec:
            spec["local"] = {"capacity": rng.choice(("64Mi", "96Mi", "2Gi"))}
        elif mooncake is None:
            return None
        elif what == "stores":
            mooncake["store"]["replicas"] = rng.choice((1, 2, 3))
        elif what == "segment":
            mooncake["store"]["segmentSize"] = rng.choice(("64Mi", "128Mi", "256Mi"))
        elif what == "image":
            mooncake["image"] = f"example/mooncake:{rng.randrange(5)}"
        else:
            return None
        return self._apply_pool(name, what)

    def _engine(self) -> tuple[str, Json] | None:
        return self._random.choice(sorted(self.wanted.engines.items(), key=lambda item: item[0])) if self.wanted.engines else None

    def _scale(self) -> Edit | None:
        if (chosen := self._engine()) is None:
            return None
        name, spec = chosen
        spec["replicas"] = self._random.randrange(4)
        return self._apply_engine(name, f"replicas {spec['replicas']}")

    def _engine_field(self) -> Edit | None:
        if (chosen := self._engine()) is None:
            return None
        name, spec = chosen
        rng = self._random
        values: dict[str, Callable[[], Any]] = {
            "image": lambda: rng.choice((None, *(f"example/engine:{number}" for number in range(4)))),
            "args": lambda: rng.choice((None, ["--max-model-len", "2048"], ["--enforce-eager"], ["--max-num-seqs=8", "--enforce-eager"])),
            "env": lambda: rng.choice((None, [{"name": "LOG", "value": "1"}], [{"name": "LOG", "value": "2"}, {"name": "MORE"}])),
            "resources": lambda: rng.choice((None, {"limits": {"memory": "4Gi"}}, {"requests": {"memory": "3Gi", "cpu": "2"}})),
            "parallelism": lambda: rng.choice((None, {"tensor": 2})),
            "template": lambda: rng.choice((None, {"metadata": {"labels": {"team": "a"}}}, {"spec": {"nodeSelector": {"gpu": "yes"}}})),
            "imagePullPolicy": lambda: rng.choice((None, "Always", "Never")),
        }
        what = rng.choice(sorted(values))
        value = values[what]()
        spec.pop(what, None)
        if value is not None:
            spec[what] = value
        return self._apply_engine(name, f"{what} {value}")

    def _apply_pool(self, name: str, what: str) -> Edit:
        return Edit(f"{name}: {what}", "apply", POOLS, name, manifest("KVCachePool", name, self.wanted.pools[name]))

    def _apply_engine(self, name: str, what: str) -> Edit:
        return Edit(f"{name}: {what}", "apply", ENGINES, name, manifest("InferenceEngine", name, self.wanted.engines[name]))


def distributed(rng: random.Random) -> Json:
    """An L2 of either kind."""
    if rng.random() < 0.3:
        return {"external": {"masterAddress": "mooncake.example:50051"}}
    return {"mooncake": {"store": {"replicas": rng.choice((1, 2)), "segmentSize": rng.choice(("64Mi", "256Mi"))}}}
