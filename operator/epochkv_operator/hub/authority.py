"""The hub's durable memory and its leadership check, on the Kubernetes API (design page "fence", section 4).

A pool's record is the pool object's status: `targetEpoch` with its origin in `reset`, `epoch` with its `proof`, `granting`,
`weightsLabels`. Whoever may write status can edit it. A target that was raised by hand is followed: it only costs a reset, and an
older leader's late write looks the same. A missing `granting` proves nothing.
`proof` is the hub's signature under the epoch that it published. `status.epoch` never goes down, for nobody: what a person wrote there
cannot be taken back, only made true. So a hub that finds an epoch without its proof does not take it for published, and proves it as it
proves every epoch. The proof also says whether any hub of the pool may have granted: `status.granting` could be removed, and the next
hub would publish without waiting for the grants before it.
Whether an epoch is proved is decided in `epochkv_fence.hub.machine` (`publish_at`); here the answer is signed and written.
Leadership is the operator's Lease.
Reads are plain GETs, which the API server answers from a quorum; never a LIST, a watch cache or `resourceVersion=0`.
Writes are compare-and-swap: first on the resourceVersion, after a conflict on the record's own fields. So a check made on the state
that was read still holds when the write lands.
"""

import hashlib
import hmac
from collections.abc import Awaitable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from epochkv_fence.protocol.messages import Source
from epochkv_fence.protocol.pool import AuthorityError, PoolRecord, Term, merged_labels
from epochkv_operator.api.resources import POOLS, ObjectRef
from epochkv_operator.kube.client import ApiError, Json, NotFound
from epochkv_operator.kube.lease import LeaseHolder
from epochkv_operator.kube.status import Decide, ObjectGone, StatusWriter


class Proof(NamedTuple):
    """What a hub has signed."""

    epoch: int
    granted: bool
    """Some hub of the pool had granted, or may have."""


class Proofs:
    """Makes and reads proofs. Only hubs know the key: it comes from the hub's secret key, which no engine has."""

    def __init__(self, hub_secret: str) -> None:
        self._key = hashlib.sha256(f"epochkv proof|{hub_secret}".encode()).digest()

    def of(self, pool_uid: str, epoch: int, granted: bool) -> str:
        said = f"{epoch}:{granted:d}"
        mac = hmac.new(self._key, f"{pool_uid}|{said}".encode(), hashlib.sha256).hexdigest()
        return f"{said}:{mac[:32]}"

    def read(self, pool_uid: str, text: object) -> Proof | None:
        """None: this hub's predecessors did not sign that for this pool."""
        epoch, _, rest = str(text or "").partition(":")
        if not (epoch.isascii() and epoch.isdigit() and len(epoch) <= 19):
            return None
        proof = Proof(int(epoch), rest.startswith("1"))
        return proof if hmac.compare_digest(str(text).encode(), self.of(pool_uid, *proof).encode()) else None


RECORD_FIELDS = ("targetEpoch", "epoch", "proof", "granting", "weightsLabels")


@dataclass(eq=False)
class KubernetesAuthority:
    """`epochkv_fence.protocol.pool.Authority` on the API server. Every call ends within `deadline_seconds`."""

    _lease: LeaseHolder
    _statuses: StatusWriter
    _proofs: Proofs
    deadline_seconds: float = 2.5  # less than the hub waits, so that its log has our reason
    _pools: dict[str, ObjectRef] = field(default_factory=dict)
    _new: set[str] = field(default_factory=set)
    _granted: set[str] = field(default_factory=set)

    def register(self, pool_uid: str, namespace: str, name: str, *, new: bool = False) -> None:
        """Make a pool known before the hub asks for it. `new`: before this process, nobody could be granted anything."""
        self._pools[pool_uid] = ObjectRef(POOLS, namespace, name, pool_uid)
        if new:
            self._new.add(pool_uid)

    def unregister(self, pool_uid: str) -> None:
        self._pools.pop(pool_uid, None)
        self._new.discard(pool_uid)
        self._granted.discard(pool_uid)

    def granted(self, pool_uid: str) -> bool:
        """Whether any hub may have granted for the pool, once its record was read."""
        return pool_uid in self._granted

    def proof(self, pool_uid: str, epoch: int) -> str:
        """`status.proof` of an epoch that this hub takes for published."""
        return self._proofs.of(pool_uid, epoch, self.granted(pool_uid))

    def believed(self, pool: Json) -> PoolRecord:
        """What the record proves."""
        uid, record = pool["metadata"]["uid"], record_of(pool)
        proof = self._proofs.read(uid, (pool.get("status") or {}).get("proof"))
        never = uid in self._new if proof is None else not proof.granted
        granting = record.granting or uid in self._granted or not never
        return replace(record, published=min(proof.epoch if proof is not None else 0, record.published), granting=granting)

    async def verify(self, term: Term) -> bool:
        """True iff the Lease names this holder in this very term, by a quorum read. No answer is an error, not a False."""
        try:
            current = await self._lease.read_term(self.deadline_seconds)
        except NotFound:
            return False
        except ApiError as error:
            raise AuthorityError(f"cannot read Lease {self._lease.place}: {error}") from error
        return current == term

    async def load(self, pool_uid: str) -> PoolRecord:
        pool = await _answered(self._statuses.read(self._ref(pool_uid), self.deadline_seconds))
        record = self.believed(pool)
        if record.granting:
            self._granted.add(pool_uid)
        return record

    async def record(self, pool_uid: str, target: int, origin: Source | None = None) -> None:
        """Durably raise the target epoch, and say in the same write who asked for it; a target that is already as high is left alone, and
        so is its origin."""

        def decide(pool: Json) -> Json | None:
            if target <= record_of(pool).target:
                return None
            reset = (pool.get("status") or {}).get("reset") or {}
            # Nothing of the reset before may look as if it belonged to this one: its times, its laggards.
            return {
                "targetEpoch": target,
                "reset": {**dict.fromkeys(reset), "epoch": target, **({"origin": origin.value} if origin is not None else {})},
            }

        await self._update(pool_uid, decide)

    async def publish(self, pool_uid: str, epoch: int) -> None:
        """Durably raise the published epoch; never down.

        A target below `epoch` is an error: the hub recorded it before, so somebody wiped the status, and the hub records it again,
        with its origin.
        """

        def decide(pool: Json) -> Json | None:
            record = self.believed(pool)
            if epoch <= record.published:
                return None
            if epoch > record.target:
                raise AuthorityError(f"epoch {epoch} cannot be published: {record.target} is recorded, somebody took the target away")
            return {"epoch": max(epoch, record_of(pool).published), "proof": self._proofs.of(pool_uid, epoch, record.granting)}

        await self._update(pool_uid, decide)

    async def note_granting(self, pool_uid: str) -> None:
        """Note that grants may be out from now on, so that a later hub waits for their end before it publishes."""

        def decide(pool: Json) -> Json | None:
            if record_of(pool).granting:
                return None
            return {"granting": True, "proof": self._proofs.of(pool_uid, self.believed(pool).published, True)}

        self._granted.add(pool_uid)  # before anybody can be granted anything, and whatever becomes of the write
        await self._update(pool_uid, decide)

    async def note_labels(self, pool_uid: str, labels: Mapping[bytes, str], held: Collection[bytes] = ()) -> None:
        """Add what weights are called; see `merged_labels` for which go."""

        def decide(pool: Json) -> Json | None:
            known = dict(record_of(pool).labels)
            merged = merged_labels(known, labels, held)
            if list(merged.items()) == list(known.items()):
                return None
            return {"weightsLabels": [{"id": weights.hex(), "label": label} for weights, label in merged.items()]}

        await self._update(pool_uid, decide)

    async def _update(self, pool_uid: str, decide: Decide) -> None:
        await _answered(self._statuses.update(self._ref(pool_uid), decide, self.deadline_seconds, depends_on=RECORD_FIELDS))

    def _ref(self, pool_uid: str) -> ObjectRef:
        try:
            return self._pools[pool_uid]
        except KeyError:
            raise AuthorityError(f"pool {pool_uid} is not registered with the authority") from None


async def _answered(call: Awaitable[Json]) -> Json:
    """The object. Errors are those of an authority."""
    try:
        return await call
    except (ObjectGone, ApiError) as error:
        raise AuthorityError(str(error)) from error


def record_of(pool: Json) -> PoolRecord:
    """What a pool object says, whoever wrote it."""
    status = pool.get("status") or {}
    target, reset = int(status.get("targetEpoch") or 0), status.get("reset") or {}
    asker = reset.get("origin") if reset.get("epoch") == target else None
    return PoolRecord(
        target=target,
        published=int(status.get("epoch") or 0),
        granting=bool(status.get("granting")),
        origin=Source(asker) if asker in {source.value for source in Source} else None,  # a newer operator may have other words
        labels={bytes.fromhex(entry["id"]): str(entry["label"]) for entry in status.get("weightsLabels") or []},
    )
