"""Carries out a plan: server-side applies in order, then prunes. The server recognises an apply that changes nothing."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import structlog

from epochkv_operator import metrics
from epochkv_operator.api.base import MANAGED_BY
from epochkv_operator.api.resources import BY_KIND, Resource, identity
from epochkv_operator.kube.client import JSON_PATCH, MERGE_PATCH, UNTYPED, ApiError, Conflict, Invalid, Json, KubeClient, NotFound
from epochkv_operator.kube.store import Store
from epochkv_operator.planning.context import Observed, Problem
from epochkv_operator.planning.names import HASH_ANNOTATION, controller_of
from epochkv_operator.planning.plan import Plan

log = structlog.get_logger(__name__)


PATCHER = f"{MANAGED_BY}-patch"
PATIENCE_SECONDS = 30.0
"""After which a step that fails is a plan's last: webhooks hang, or the API server does. Status, gates and copies wait for it."""
WORKLOADS = ("Deployment", "StatefulSet", "LeaderWorkerSet")


def _problem(name: str, error: ApiError, *, other: str, **reasons: str) -> Problem | None:
    """What to tell the user; None for a conflict, which the next try ends."""
    if isinstance(error, Conflict):
        return None
    reason = reasons.get(type(error).__name__, other)
    return Problem(reason, f"{name}{error if reason == other else error.message}")


@dataclass(eq=False)
class Executor:
    """Applies and deletes children, and takes the answers into the store."""

    _client: KubeClient
    _store: Store

    async def bring_about(self, about: str, seen: Observed, planned: Callable[[Observed], Plan]) -> tuple[Problem | None, Exception | None]:
        """Plan, and do what the plan says, unless an object that it would make is there already and is somebody else's:
        an apply would take that over by force. Returns as `execute`.
        """
        try:
            plan = planned(seen)
            if not await self._owner_stays(plan):
                return None, None
            if strangers := await self._strangers(seen, plan):
                plan = planned(replace(seen, children=(*seen.children, *strangers)))
        except ApiError as error:
            return _problem("", error, Forbidden="ReadForbidden", other="ReadFailed"), error
        except Exception as error:  # gates, copies and the status do not wait for our mistake
            text = f"the operator fails at this spec ({error!r}), and changes nothing; report it with the operator's log"
            return Problem("PlanFailed", text), error
        return (plan.problem, None) if plan.problem is not None else await self.execute(about, plan)

    async def _owner_stays(self, plan: Plan) -> bool:
        """Who took owner references away may be the garbage collector, of an owner that is deleted without its children
        (`--cascade=orphan`), which its watch has not shown yet. Given back, they would have the children deleted, too."""
        for desired, why in zip(plan.apply, plan.details, strict=False):
            if ": metadata.ownerReferences" not in why:
                continue
            owner = controller_of(desired)
            try:
                live = (await self._client.get(BY_KIND[owner["kind"]], desired["metadata"]["namespace"], owner["name"]))["metadata"]
            except NotFound:
                return False
            return bool(live["uid"] == owner["uid"] and not live.get("deletionTimestamp"))
        return True

    async def _strangers(self, seen: Observed, plan: Plan) -> list[Json]:
        """Live objects of wanted names that do not carry the label which `seen` was selected by.

        They belong to another pool or engine, or this operator never made them and its watches do not show them.
        """
        known = {identity(child) for child in seen.children}
        found = []
        for desired in plan.apply:
            if identity(desired) in known:
                continue
            live = self._store.get(*identity(desired))
            if live is None:
                metadata = desired["metadata"]
                try:
                    live = await self._client.get(BY_KIND[desired["kind"]], metadata["namespace"], metadata["name"])
                except NotFound:
                    continue
            found.append(live)
        return found

    async def execute(self, about: str, plan: Plan) -> tuple[Problem | None, ApiError | None]:
        """Do what the plan says. What fails for one object does not hold up the others.

        Returns what to tell the user about objects that could not be written, and the error to try again on once the user was told.
        Rights and quotas change, and so does what admission rejects.
        """
        problem: Problem | None = None
        again: ApiError | None = None
        began = time.monotonic()
        steps = (*((obj, self._apply) for obj in plan.apply), *((obj, self._delete) for obj in plan.delete))
        for (what, step), why in zip(steps, plan.details, strict=True):
            try:
                await step(about, what, why.split(": ", 1)[-1])
            except ApiError as error:
                name = f"{what['kind']} {what['metadata']['name']}: "
                problem = problem or _problem(name, error, Invalid="ApplyRefused", Forbidden="ApplyForbidden", other="ApplyFailed")
                again = again or error
                if time.monotonic() > began + PATIENCE_SECONDS or (plan.delete and what["kind"] in WORKLOADS and step == self._apply):
                    break  # what is to be deleted may serve in the place of what could not be made
        return problem, again

    async def _apply(self, about: str, desired: Json, reason: str) -> None:
        live = self._store.get(*identity(desired))
        answer = await self._send(BY_KIND[desired["kind"]], desired, live)
        self._store.upsert(desired["kind"], answer)
        if live is not None and answer["metadata"]["resourceVersion"] == live["metadata"]["resourceVersion"]:
            return
        metrics.API_WRITES.labels(kind=desired["kind"], operation="apply").inc()
        verb = "created" if live is None else "updated"
        log.info("child applied", object=about, child=f"{desired['kind']} {desired['metadata']['name']}", what=verb, reason=reason)

    async def _send(self, resource: Resource, desired: Json, live: Json | None) -> Json:
        """Apply. Where somebody else's item of a list stands against ours, such as a port whose number was edited and that kept its name,
        an apply adds ours beside it and is refused for ever: then our lists take the place of those that are there. So it is with
        `rollingUpdate`, which the API server has added to a Deployment by itself, once the type is `Recreate`. Not so with a
        field that the schema lacks: a patch would drop it. The patch's entry goes, or no later apply could take away what it set. Its
        hash goes first: if the rest is cut off, the object still differs."""
        namespace = desired["metadata"]["namespace"]
        try:
            return await self._client.apply(resource, namespace, desired)
        except Invalid as error:
            if live is None or "spec" not in desired or UNTYPED in error.message:
                raise
            with contextlib.suppress(Invalid):  # the first refusal says more
                path, spec = resource.path(namespace, desired["metadata"]["name"]), desired["spec"]
                if "strategy" in spec:
                    spec = {**spec, "strategy": {"rollingUpdate": None, **spec["strategy"]}}
                patch, query = partial(self._client.request, "PATCH", path), {"fieldManager": PATCHER}
                body = {"metadata": {"annotations": {HASH_ANNOTATION: None}}, "spec": spec}
                entries = (await patch(query=query, body=body, content_type=MERGE_PATCH))["metadata"]["managedFields"]
                for place in [place for place, entry in enumerate(entries) if entry["manager"] == PATCHER]:
                    where = {"path": f"/metadata/managedFields/{place}"}
                    await patch(body=[{"op": "test", "value": entries[place], **where}, {"op": "remove", **where}], content_type=JSON_PATCH)
                return await self._client.apply(resource, namespace, desired)
            raise

    async def _delete(self, about: str, child: Json, reason: str) -> None:
        metadata = child["metadata"]
        try:
            await self._client.delete(BY_KIND[child["kind"]], metadata["namespace"], metadata["name"], metadata["uid"])
        except NotFound:
            return
        log.info("child deleted", object=about, child=f"{child['kind']} {metadata['name']}", reason=reason)
