"""Server-side apply of children, skipped when it would change nothing, so that a steady cluster sees no writes.

Whether something differs cannot be seen by comparing a manifest with the live object: the server fills in defaults and
rewrites quantities. So the answer of an apply is the reference: its values at the paths we own are remembered together
with a digest of the manifest. As long as the manifest is the same and the live values at those paths are the same,
nothing is sent. After a restart each child is applied once; the server recognises an apply that changes nothing and
writes nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from typing import Any

from epochkv_operator import metrics
from epochkv_operator.api.base import MANAGED_BY
from epochkv_operator.kube.client import MERGE_PATCH, Invalid, Json, KubeClient
from epochkv_operator.kube.resources import Resource, by_kind, identity


def project(desired: Any, live: Any) -> Any:
    """The live values at the paths that `desired` has. Lists of named things are matched by name, other lists taken
    whole.
    """
    if isinstance(desired, dict):
        if not isinstance(live, dict):
            return live
        return {key: project(value, live.get(key)) for key, value in desired.items()}
    if isinstance(desired, list) and isinstance(live, list):
        if desired and all(isinstance(item, dict) and "name" in item for item in desired):
            named = {item.get("name"): item for item in live if isinstance(item, dict)}
            return [project(item, named.get(item["name"])) for item in desired]
        return live
    return live


def _digest(manifest: Json) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


class Applier:
    """Remembers per object what was applied. Forgetting is harmless: one more apply."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client
        self._applied: dict[tuple[str, str, str], tuple[str, str, Any]] = {}  # -> uid, digest of the manifest, projection of the answer

    async def apply(self, desired: Json, live: Json | None) -> Json | None:
        """Apply, unless that would change nothing. Returns the new live object when something was sent, else None.

        Raises:
            ApiError: refused or unreachable; nothing is remembered then.
        """
        desired = _leave_replicas_alone(desired, live)
        key, said = identity(desired), _digest(desired)
        if (
            live is not None
            and not live["metadata"].get("deletionTimestamp")
            and self._applied.get(key) == (live["metadata"]["uid"], said, project(desired, live))
        ):
            return None
        resource = by_kind(desired["kind"])
        answer = await self._apply(resource, desired, live)
        if live is None or answer["metadata"].get("resourceVersion") != live["metadata"].get("resourceVersion"):
            metrics.API_WRITES.labels(kind=desired["kind"], operation="apply").inc()
        self._applied[key] = (answer["metadata"]["uid"], said, project(desired, answer))
        return answer

    async def _apply(self, resource: Resource, desired: Json, live: Json | None) -> Json:
        """Apply. Where somebody else's item of a list stands against ours, such as a port whose number was edited and that kept its
        name, an apply adds ours beside it and is refused for ever: then our lists take the place of those that are there.
        """
        namespace = desired["metadata"]["namespace"]
        try:
            return await self._client.apply(resource, namespace, desired)
        except Invalid:
            if live is None or "spec" not in desired:
                raise
            with contextlib.suppress(Invalid):  # the first refusal says more
                path, spec = resource.path(namespace, desired["metadata"]["name"]), {"spec": desired["spec"]}
                await self._client.request("PATCH", path, query={"fieldManager": MANAGED_BY}, body=spec, content_type=MERGE_PATCH)
                return await self._client.apply(resource, namespace, desired)
            raise

    def forget(self, kind: str, namespace: str, name: str) -> None:
        self._applied.pop((kind, namespace, name), None)


def _leave_replicas_alone(desired: Json, live: Json | None) -> Json:
    """Drop `spec.replicas` once somebody owns it through the scale subresource; only then is dropping safe (nobody
    resets it to 1).
    """
    if live is None or not live.get("x-scaled-by-others") or "replicas" not in desired.get("spec", {}):
        return desired
    return {**desired, "spec": {key: value for key, value in desired["spec"].items() if key != "replicas"}}
