"""The pods of an engine: one that holds a whole replica or leads a group, and those that follow it."""

from __future__ import annotations

from functools import partial

from epochkv_fence import quantity
from epochkv_operator.api.engine import InferenceEngine, InferenceEngineSpec
from epochkv_operator.api.pool import KVCachePool
from epochkv_operator.planning import connection as wiring
from epochkv_operator.planning import podspec
from epochkv_operator.planning.context import Context, Json
from epochkv_operator.planning.engine.arguments import (
    PRE_STOP_SECONDS,
    command,
    environment,
    follower_command,
    serves_tls,
    set_shutdown_timeout,
    shutdown_seconds,
)
from epochkv_operator.planning.engine.model import model_volumes
from epochkv_operator.planning.engine.startup import PERIOD_SECONDS, startup_failures
from epochkv_operator.planning.merge import FENCE_VOLUME, finish_pod
from epochkv_operator.planning.names import (
    CONNECTION_ANNOTATION,
    CREDENTIALS_DIR,
    ENGINE_PORT,
    component_name,
    engine_account,
    engine_labels,
)

_GRACE_SECONDS = 60
_SHM_BYTES_PER_RANK = 256 * 2**20  # 64 MiB is too little for one rank
_PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


def pod_template(engine: InferenceEngine, pool: KVCachePool | None, context: Context) -> Json:
    """`{metadata, spec}` of the pods that serve.

    Raises:
        InvalidTemplate: an override in `spec.template` that belongs to the operator.
    """
    health = partial(podspec.http_probe, "/health", ENGINE_PORT, tls=serves_tls(engine.spec))
    container = {
        **command(engine, pool, context),
        "ports": [podspec.port("http", ENGINE_PORT)],
        "startupProbe": health(period=PERIOD_SECONDS, failures=startup_failures(engine.spec)),
        "readinessProbe": health(period=5, failures=3),
        "livenessProbe": health(period=10, failures=3),
        # While vLLM drains it answers new requests with nothing: traffic has to stop first.
        "lifecycle": {"preStop": {"sleep": {"seconds": PRE_STOP_SECONDS}}},
    }
    template = _finished(engine, pool, context, container)
    set_shutdown_timeout(template["spec"], engine.spec)
    return template


def follower_template(engine: InferenceEngine, pool: KVCachePool | None, context: Context) -> Json:
    """`{metadata, spec}` of the pods of a group that only compute. Raises as `pod_template`."""
    template = _finished(engine, pool, context, follower_command(engine, pool, context))
    container = next(container for container in template["spec"]["containers"] if container["name"] == "engine")
    for probe in _PROBES:
        container.pop(probe, None)  # nothing listens; one that ends takes its group with it
    # The first pod finishes its requests, for which it needs the others.
    container["lifecycle"] = {"preStop": {"sleep": {"seconds": PRE_STOP_SECONDS + shutdown_seconds(template["spec"])}}}
    return template


def _finished(engine: InferenceEngine, pool: KVCachePool | None, context: Context, container: Json) -> Json:
    template: Json = {"metadata": {"labels": engine_labels(engine)}, "spec": _pod_spec(engine, pool, context, container)}
    if pool is not None:
        config = wiring.connection(pool, context)
        template["metadata"]["annotations"] = {CONNECTION_ANNOTATION: wiring.connection_hash(config, context)}
    return finish_pod(template, engine.spec.template, "engine", "spec.template")


def _pod_spec(engine: InferenceEngine, pool: KVCachePool | None, context: Context, runs: Json) -> Json:
    spec = engine.spec
    shm = quantity.from_bytes(_SHM_BYTES_PER_RANK * spec.parallelism.ranks_per_pod)
    model, model_mounts = model_volumes(spec)
    mounts: list[Json] = [{"name": "tmp", "mountPath": "/tmp"}, {"name": "shm", "mountPath": "/dev/shm"}, *model_mounts]
    volumes: list[Json] = [
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": shm}},
        *model,
    ]
    if pool is not None:
        mounts.append({"name": FENCE_VOLUME, "mountPath": CREDENTIALS_DIR, "readOnly": True})
        secret = {"secretName": component_name(pool.metadata.name, "fence"), "defaultMode": 0o440}
        volumes.append({"name": FENCE_VOLUME, "secret": secret})
    container: Json = {
        "name": "engine",
        "image": spec.image or context.engine_image,
        **runs,
        "env": environment(engine, pool),
        "resources": _resources(spec, pool),
        "securityContext": podspec.container_security(),
        "volumeMounts": mounts,
    }
    if spec.image_pull_policy is not None:
        container["imagePullPolicy"] = spec.image_pull_policy
    pod = {
        **podspec.base_spec(),
        "serviceAccountName": engine_account(engine.metadata.name),
        "terminationGracePeriodSeconds": _GRACE_SECONDS,
        "containers": [container],
        "volumes": volumes,
    }
    return podspec.with_rdma(pod, wiring.rdma_resource(pool)) if pool is not None and wiring.uses_rdma(pool) else pod


def local_bytes(spec: InferenceEngineSpec, pool: KVCachePool | None) -> int:
    """Bytes of L1 in each pod, which are added to its memory amounts. A replica's L1 is spread over its pods."""
    if pool is None or pool.spec.local is None:
        return 0
    return -(-quantity.to_bytes(pool.spec.local.capacity) // spec.parallelism.nodes)


def _resources(spec: InferenceEngineSpec, pool: KVCachePool | None) -> Json:
    """What the user asked for, with L1 added to each memory amount; with no amount given, L1 alone is requested."""
    given = spec.resources.model_dump(exclude_none=True) if spec.resources is not None else {}
    resources: Json = {section: dict(amounts) for section, amounts in given.items()}
    local = local_bytes(spec, pool)
    if not local:
        return resources
    sections = [section for section in resources if "memory" in resources[section]]
    for section in sections:
        resources[section]["memory"] = quantity.from_bytes(quantity.to_bytes(resources[section]["memory"]) + local)
    if not sections:
        resources.setdefault("requests", {})["memory"] = quantity.from_bytes(local)
    return resources
