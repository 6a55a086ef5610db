"""The objects of an InferenceEngine: a vLLM Deployment with the connector of its pool, and what belongs around it."""

from __future__ import annotations

from epochkv_operator.api import quantity
from epochkv_operator.api.engine import InferenceEngine, InferenceEngineSpec
from epochkv_operator.api.pool import KVCachePool
from epochkv_operator.planning import connection as wiring
from epochkv_operator.planning import podspec
from epochkv_operator.planning.context import Context, Json
from epochkv_operator.planning.merge import FENCE_VOLUME, finish_pod
from epochkv_operator.planning.names import (
    CONNECTION_ANNOTATION,
    CREDENTIALS_DIR,
    ENGINE_PORT,
    component_name,
    engine_labels,
    engine_object,
    engine_selector,
)
from epochkv_operator.planning.network import engine_policy

_GRACE_SECONDS = 60
_KUBERNETES_GRACE_SECONDS = 30  # where a template removes ours
_PRE_STOP_SECONDS = 5
_SHUTDOWN_MARGIN_SECONDS = 15
_SHM_BYTES_PER_RANK = 256 * 2**20  # 64 MiB is too little for one rank


def desired_engine(engine: InferenceEngine, pool: KVCachePool | None, context: Context) -> list[Json]:
    """Every object of an engine.

    `pool` is the pool that `spec.poolRef` names. None: no pool is named, or it does not exist *in a complete listing*. The engine
    then serves without connector. Passing None because the pool is merely not known yet would restart every engine twice.

    Raises:
        InvalidTemplate: an override in `spec.template` that belongs to the operator.
    """
    selector = engine_selector(engine.metadata.name)
    bodies: dict[str, Json] = {
        "ServiceAccount": {"automountServiceAccountToken": False},
        "Deployment": {"spec": _deployment(engine, pool, context)},
        "Service": {"spec": podspec.service(selector, "http", ENGINE_PORT)},
        "PodDisruptionBudget": podspec.budget(selector),
    }
    policies = engine_policy(engine, pool, context) if pool is not None else []
    return [*(engine_object(kind, engine, context, body) for kind, body in bodies.items()), *policies]


def _deployment(engine: InferenceEngine, pool: KVCachePool | None, context: Context) -> Json:
    template: Json = {"metadata": {"labels": engine_labels(engine)}, "spec": _pod_spec(engine, pool, context)}
    if pool is not None:
        config = wiring.connection(pool, context)
        template["metadata"]["annotations"] = {CONNECTION_ANNOTATION: wiring.connection_hash(config, context)}
    template = finish_pod(template, engine.spec.template, "engine", "spec.template")
    _set_shutdown_timeout(template["spec"], engine.spec)
    return {
        "replicas": engine.spec.replicas,
        "revisionHistoryLimit": 3,
        "progressDeadlineSeconds": 900,
        "selector": {"matchLabels": engine_selector(engine.metadata.name)},
        # No surge: there is rarely a free accelerator for a second pod.
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1, "maxSurge": 0}},
        "template": template,
    }


def _pod_spec(engine: InferenceEngine, pool: KVCachePool | None, context: Context) -> Json:
    spec = engine.spec
    shm = quantity.from_bytes(_SHM_BYTES_PER_RANK * spec.parallelism.tensor)
    mounts: list[Json] = [{"name": "tmp", "mountPath": "/tmp"}, {"name": "shm", "mountPath": "/dev/shm"}]
    volumes: list[Json] = [
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": shm}},
    ]
    if pool is not None:
        mounts.append({"name": FENCE_VOLUME, "mountPath": CREDENTIALS_DIR, "readOnly": True})
        secret = {"secretName": component_name(pool.metadata.name, "fence"), "defaultMode": 0o440}
        volumes.append({"name": FENCE_VOLUME, "secret": secret})
    container: Json = {
        "name": "engine",
        "image": spec.image or context.engine_image,
        "command": ["python3", "-m", "vllm.entrypoints.openai.api_server"],
        "args": _arguments(engine, pool, context),
        "env": _environment(engine, pool),
        "ports": [podspec.port("http", ENGINE_PORT)],
        "resources": _resources(spec, pool),
        "startupProbe": podspec.http_probe("/health", ENGINE_PORT, period=5, failures=60),
        "readinessProbe": podspec.http_probe("/health", ENGINE_PORT, period=5, failures=3),
        "livenessProbe": podspec.http_probe("/health", ENGINE_PORT, period=10, failures=3),
        # While vLLM drains it answers new requests with nothing: traffic has to stop first.
        "lifecycle": {"preStop": {"sleep": {"seconds": _PRE_STOP_SECONDS}}},
        "securityContext": podspec.container_security(),
        "volumeMounts": mounts,
    }
    if spec.image_pull_policy is not None:
        container["imagePullPolicy"] = spec.image_pull_policy
    pod = {
        **podspec.base_spec(),
        "serviceAccountName": engine.metadata.name,
        "terminationGracePeriodSeconds": _GRACE_SECONDS,
        "containers": [container],
        "volumes": volumes,
    }
    return podspec.with_rdma(pod, wiring.rdma_resource(pool)) if pool is not None and wiring.uses_rdma(pool) else pod


def _arguments(engine: InferenceEngine, pool: KVCachePool | None, context: Context) -> list[str]:
    """vLLM's arguments: what the spec says, our defaults unless the user says otherwise, the user's, and the connector last."""
    spec = engine.spec
    arguments = ["--model", spec.model.source or spec.model.name, "--port", str(ENGINE_PORT)]
    if spec.model.revision is not None:
        arguments += ["--revision", spec.model.revision]
    if spec.parallelism.tensor > 1:
        arguments += ["--tensor-parallel-size", str(spec.parallelism.tensor)]
    given = _flags(spec.args or ())
    if "--served-model-name" not in given:
        arguments += ["--served-model-name", spec.model.name]
    if not given & {"--enable-prompt-tokens-details", "--no-enable-prompt-tokens-details"}:
        arguments.append("--enable-prompt-tokens-details")
    arguments += spec.args or ()
    if pool is not None:
        config = wiring.connection(pool, context)
        arguments += ["--kv-transfer-config", wiring.transfer_config(config)]
    return arguments


def _set_shutdown_timeout(pod: Json, spec: InferenceEngineSpec) -> None:
    """Let running requests finish before the kubelet kills: the default aborts them. Depends on the merged grace period."""
    if "--shutdown-timeout" in _flags(spec.args or ()):
        return
    grace = pod.get("terminationGracePeriodSeconds", _KUBERNETES_GRACE_SECONDS)
    seconds = max(0, int(grace) - _PRE_STOP_SECONDS - _SHUTDOWN_MARGIN_SECONDS)
    container = next(container for container in pod["containers"] if container["name"] == "engine")
    container["args"] = ["--shutdown-timeout", str(seconds), *container["args"]]


def _flags(arguments: tuple[str, ...]) -> set[str]:
    """Names of the options given, as vLLM's parser reads them."""
    return {argument.split("=", 1)[0].replace("_", "-") for argument in arguments if argument.startswith("--")}


def _environment(engine: InferenceEngine, pool: KVCachePool | None) -> list[Json]:
    """Ours first, so that the user's may refer to them as `$(POD_IP)`. Only the first few can be replaced; the rest is refused
    at admission."""
    user = [variable.model_dump(exclude_none=True) for variable in engine.spec.env or ()]
    taken = {variable["name"] for variable in user}
    # A user id without a passwd entry: libraries ask for HOME and USER.
    defaults = {"HOME": "/tmp", "USER": "vllm", "VLLM_NO_USAGE_STATS": "1"}
    own: list[Json] = [
        *podspec.environment({name: value for name, value in defaults.items() if name not in taken}),
        {"name": "POD_NAME", "valueFrom": podspec.downward("metadata.name")},
        {"name": "POD_NAMESPACE", "valueFrom": podspec.downward("metadata.namespace")},
        podspec.pod_ip(),
    ]
    if pool is not None:
        own.append({"name": "EPOCHKV_ENGINE_NAME", "value": engine.metadata.name})
        own += podspec.environment(wiring.client_environment(pool))
    return own + user


def _resources(spec: InferenceEngineSpec, pool: KVCachePool | None) -> Json:
    """What the user asked for, with L1 added to each memory amount; with no amount given, L1 alone is requested."""
    given = spec.resources.model_dump(exclude_none=True) if spec.resources is not None else {}
    resources: Json = {section: dict(amounts) for section, amounts in given.items()}
    if pool is None or pool.spec.local is None:
        return resources
    local = quantity.to_bytes(pool.spec.local.capacity)
    sections = [section for section in resources if "memory" in resources[section]]
    for section in sections:
        resources[section]["memory"] = quantity.from_bytes(quantity.to_bytes(resources[section]["memory"]) + local)
    if not sections:
        resources.setdefault("requests", {})["memory"] = quantity.from_bytes(local)
    return resources
