"""An engine that spans nodes: groups of pods, made, replaced and restarted together by LeaderWorkerSet (https://lws.sigs.k8s.io).

vLLM's own launcher starts the ranks (`--nnodes`), so nothing like Ray is needed. The first pod of a group answers requests, schedules
and speaks with the hub; it drives the ranks of the others, which reach only each other and the pool's store.
"""

from __future__ import annotations

from typing import Final

from epochkv_operator.api.engine import InferenceEngine
from epochkv_operator.api.pool import KVCachePool
from epochkv_operator.planning.context import Context, Json, KindNotServed
from epochkv_operator.planning.engine.pod import follower_template, pod_template

PREFIX: Final = "leaderworkerset.sigs.k8s.io/"


def leader_worker_set(engine: InferenceEngine, pool: KVCachePool | None, context: Context) -> Json:
    """Body of the LeaderWorkerSet.

    Raises:
        KindNotServed: the cluster has none.
        InvalidTemplate: as `pod_template`.
    """
    if "LeaderWorkerSet" not in context.served:
        raise KindNotServed(
            f"spec.parallelism.nodes is {engine.spec.parallelism.nodes}, and this cluster does not serve LeaderWorkerSets"
            " (leaderworkerset.x-k8s.io/v1), or the operator may not list them: install LeaderWorkerSet (https://lws.sigs.k8s.io); pods"
            " start within half a minute after that"
        )
    return {
        "spec": {
            "replicas": engine.spec.replicas,
            "startupPolicy": "LeaderCreated",  # the first pod waits for the others before it is ready
            "rolloutStrategy": {"type": "RollingUpdate", "rollingUpdateConfiguration": engine.spec.update_strategy.model_dump()},
            "networkConfig": {"subdomainPolicy": "Shared"},
            "leaderWorkerTemplate": {
                "size": engine.spec.parallelism.nodes,
                # A rank that was restarted alone finds nobody who waits for it.
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": pod_template(engine, pool, context),
                "workerTemplate": follower_template(engine, pool, context),
            },
        }
    }


def placement(engine: InferenceEngine) -> dict[str, str]:
    """Annotations of the template that LeaderWorkerSet reads on its own object, such as `exclusive-topology`."""
    template = engine.spec.template
    given = template.metadata.annotations if template is not None and template.metadata is not None else None
    return {key: value for key, value in (given or {}).items() if key.startswith(PREFIX)}
