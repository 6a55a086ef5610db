"""Leadership by a `coordination.k8s.io` Lease, taken in `main()` around everything that writes.

A Lease alone does not fence: a frozen holder may wake up believing in it. So every grant and every publication verifies it by a quorum
read against the *term*: holder and transitions. Every process start draws a new identity, hence a term never comes back. A foreign Lease
has expired when its term and renewal stayed unchanged for long enough by our monotonic clock. Its times are never compared with ours.
"""

import asyncio
import socket
import time
import uuid
from collections.abc import Callable

import structlog

from epochkv_fence.common import lease_clock
from epochkv_fence.protocol.pool import Term
from epochkv_operator import metrics
from epochkv_operator.api.base import OURS
from epochkv_operator.api.resources import LEASES, micro_time
from epochkv_operator.kube.client import ApiError, Conflict, Json, KubeClient, NotFound

log = structlog.get_logger(__name__)
SILENT_SECONDS = 60.0
"""After which a standby that nothing has answered connects anew."""


class LeaseLost(Exception):
    """Somebody else leads, or we could not renew in time: the process must end."""


def new_identity() -> str:
    """Unique per process start: hostname (the pod's name) and a random part."""
    return f"{socket.gethostname()}_{uuid.uuid4().hex[:12]}"


def term_of(lease: Json) -> Term:
    spec = lease.get("spec", {})
    return Term(spec.get("holderIdentity") or "", spec.get("leaseTransitions") or 0)


class LeaseHolder:
    """Takes the Lease, keeps it, gives it back. `duration_seconds`: how long others wait after our last renewal."""

    def __init__(self, client: KubeClient, namespace: str, name: str, identity: str, duration_seconds: int = 15) -> None:
        self.namespace = namespace
        self.name = name
        self.place = f"{namespace}/{name}"
        self.identity = identity
        self.duration_seconds = duration_seconds
        self.renew_seconds = duration_seconds / 5
        self.deadline_seconds = duration_seconds * 2 / 3
        self.term: Term | None = None
        self.renewed_at = 0.0  # by `lease_clock`: time for which this machine was suspended counts
        self.recovered: Callable[[], None] = lambda: None
        """Called when the Lease was renewed after a try that failed."""
        self._client = client
        self._lease: Json = {}
        self._seen: tuple[object, float] = (None, 0.0)  # term and renewal of a foreign record, and when they were first seen

    async def acquire(self) -> Term:
        """Wait until the Lease is ours. Raises `Unavailable`: nothing has answered for `SILENT_SECONDS`."""
        waiting_for: str | None = None
        answered_at = time.monotonic()
        while True:
            try:
                term = await self._try_acquire()
                if term is not None:
                    return term
                answered_at, holder = time.monotonic(), term_of(self._lease).holder
                if holder != waiting_for:
                    waiting_for = holder
                    log.info("standby: another operator leads", lease=self.place, holder=holder)
            except Conflict:
                pass  # somebody was faster; look again
            except ApiError as error:
                if error.status:
                    answered_at = time.monotonic()
                elif time.monotonic() - answered_at > SILENT_SECONDS:
                    raise
                if waiting_for != str(error):
                    waiting_for = str(error)
                    log.warning("cannot read or take the Lease yet, trying again", lease=self.place, error=waiting_for)
            await asyncio.sleep(min(self.renew_seconds, 2.0))

    async def hold(self) -> None:
        """Renew until the Lease is lost; returns never.

        Raises:
            LeaseLost: another holder, or no renewal within two thirds of the duration.
        """
        error: ApiError | None = None
        while True:
            await asyncio.sleep(self.renew_seconds if error is None else min(1.0, self.renew_seconds / 4))
            remaining = self.renewed_at + self.deadline_seconds - lease_clock()
            if remaining <= 0:
                raise LeaseLost(f"Lease {self.place} could not be renewed for {self.deadline_seconds:g} s: {error}")
            try:
                await self._renew(min(remaining, self.renew_seconds))
                if error is not None:
                    self.recovered()
                error = None
            except ApiError as failure:
                error = failure

    async def release(self) -> None:
        """Give the Lease back so that a standby takes over at once. Best effort: a failure only makes the standby wait."""
        term, self.term = self.term, None
        if term is None:
            return
        try:
            await self._put_ours({"holderIdentity": "", "leaseDurationSeconds": 1}, 2.0, term)
            log.info("lease released", lease=self.place)
        except (ApiError, LeaseLost) as error:
            log.warning("lease not released, a standby waits until it expires", lease=self.place, error=str(error))

    async def read_term(self, deadline_seconds: float) -> Term:
        """Who leads now, by a quorum read."""
        return term_of(await self._client.get(LEASES, self.namespace, self.name, deadline_seconds))

    async def _try_acquire(self) -> Term | None:
        try:
            self._lease = await self._client.get(LEASES, self.namespace, self.name)
        except NotFound:
            metadata = {"name": self.name, "namespace": self.namespace, "labels": OURS}
            body = {"apiVersion": LEASES.api_version, "kind": LEASES.kind, "metadata": metadata}
            self._lease = await self._client.create(LEASES, self.namespace, body)  # held by nobody yet
        spec = self._lease.get("spec", {})
        renewal = term_of(self._lease), spec.get("renewTime")  # others may write the rest, such as labels
        now_monotonic, started = time.monotonic(), lease_clock()
        if self._seen[0] != renewal:
            self._seen = (renewal, now_monotonic)
        expired = now_monotonic - self._seen[1] >= (spec.get("leaseDurationSeconds") or self.duration_seconds)
        if spec.get("holderIdentity") not in (None, "", self.identity) and not expired:  # ours: by a write that had no answer
            return None
        taken = {
            "holderIdentity": self.identity,
            "leaseDurationSeconds": self.duration_seconds,
            "acquireTime": micro_time(),
            "leaseTransitions": (spec.get("leaseTransitions") or 0) + 1,
        }
        await self._put(taken, self.deadline_seconds)
        self.renewed_at = started
        self.term = term_of(self._lease)
        log.info("lease acquired", lease=self.place, holder=self.identity, transitions=self.term.transitions)
        return self.term

    async def _renew(self, deadline_seconds: float) -> None:
        started = lease_clock()
        assert self.term is not None
        try:
            await self._put_ours({}, deadline_seconds, self.term)
        except NotFound:
            raise LeaseLost(f"Lease {self.place} was deleted") from None
        metrics.LEASE_RENEWAL_SECONDS.observe(started - self.renewed_at)
        self.renewed_at = started

    async def _put_ours(self, spec: Json, deadline_seconds: float, term: Term) -> None:
        """Also over a write of ours that had no answer, or was cut. Raises `LeaseLost`: it is somebody else's by now."""
        try:
            await self._put(spec, deadline_seconds)
        except Conflict:
            self._lease = await self._client.get(LEASES, self.namespace, self.name, deadline_seconds)
            if term_of(self._lease) != term:
                raise LeaseLost(f"Lease {self.place} is held by {term_of(self._lease).holder!r} now") from None
            await self._put(spec, deadline_seconds)

    async def _put(self, spec: Json, deadline_seconds: float) -> None:
        body = {**self._lease, "spec": {**self._lease.get("spec", {}), **spec, "renewTime": micro_time()}}
        self._lease = await self._client.replace(LEASES, self.namespace, body, deadline_seconds)
