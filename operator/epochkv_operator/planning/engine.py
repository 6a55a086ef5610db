"""The objects of an InferenceEngine: vLLM pods with the connector of their pool, and what belongs around them."""

from functools import partial
from typing import Final

from epochkv_fence import quantity
from epochkv_operator.api.base import ANY, GATE, POOL_LABEL
from epochkv_operator.api.engine import InferenceEngine, InferenceEngineSpec, is_zero
from epochkv_operator.api.pool import KVCachePool
from epochkv_operator.planning import connection as wiring
from epochkv_operator.planning import names, podspec
from epochkv_operator.planning.context import Context, Json, KindNotServed
from epochkv_operator.planning.serving import ANYTHING

MODELS_DIR: Final = "/models"
CACHE_DIR: Final = "/cache"
MODEL_VOLUME: Final = "model"


def model_path(spec: InferenceEngineSpec) -> str:
    """What vLLM's `--model` says."""
    model = spec.model
    if model.volume is not None:
        return f"{MODELS_DIR}/{model.volume.path}" if model.volume.path else MODELS_DIR
    return model.source or model.name


def model_environment(spec: InferenceEngineSpec) -> dict[str, str]:
    """Defaults, which the user may replace."""
    if spec.model.volume is not None:
        return {"HF_HUB_OFFLINE": "1"}
    return {"HF_HOME": f"{CACHE_DIR}/huggingface"} if spec.model.cache is not None else {}


def model_volumes(spec: InferenceEngineSpec) -> tuple[list[Json], list[Json]]:
    """Volumes of the pod, and their mounts in the engine container."""
    if spec.model.volume is not None:
        used = spec.model.volume
        claim = {"persistentVolumeClaim": {"claimName": used.claim_name, "readOnly": True}}
        source = claim if used.image is None else {"image": used.image.model_dump(exclude_none=True)}
        return [{"name": MODEL_VOLUME, **source}], [{"name": MODEL_VOLUME, "mountPath": MODELS_DIR, "readOnly": True}]
    if spec.model.cache is not None:
        volume = {"name": "model-cache", "persistentVolumeClaim": {"claimName": spec.model.cache.claim_name}}
        return [volume], [{"name": "model-cache", "mountPath": CACHE_DIR}]
    return [], []


PRE_STOP_SECONDS = 5
_SHUTDOWN_MARGIN_SECONDS = 15
_KUBERNETES_GRACE_SECONDS = 30  # where a template removes ours


def command(engine: InferenceEngine, pool: KVCachePool | None, context: Context) -> Json:
    """`command` and `args` of a pod that holds a whole replica, or of the first pod of a group."""
    spec = engine.spec
    arguments = ["--model", model_path(spec), *_shared(engine, pool, context)]
    if spec.parallelism.nodes > 1:
        arguments += ["--node-rank", "0"]
    if spec.parallelism.nodes > 1 and spec.parallelism.data > 1:  # where it listens; the others ask at --master-addr
        arguments += ["--data-parallel-address", "$(POD_IP)"]
    listening = "python3 -m vllm.entrypoints.openai.api_server --host $any"  # vLLM's default is IPv4 alone
    return {"command": podspec.started(listening, podspec.EVERY_ADDRESS), "args": arguments}


def follower_command(engine: InferenceEngine, pool: KVCachePool | None, context: Context) -> Json:
    """`command` and `args` of the other pods of a group: ranks only, which the first pod drives. LeaderWorkerSet sets the variables.

    vLLM takes from `--nnodes` and `--node-rank` which data-parallel ranks a pod has.
    """
    arguments = ["serve", model_path(engine.spec), "--headless", *_shared(engine, pool, context), "--node-rank", "$(LWS_WORKER_INDEX)"]
    return {"command": ["python3", "-m", "vllm.entrypoints.cli.main"], "args": arguments}


def _shared(engine: InferenceEngine, pool: KVCachePool | None, context: Context) -> list[str]:
    """What all pods of a replica are told."""
    spec = engine.spec
    arguments = ["--port", str(names.ENGINE_PORT)]
    if spec.model.revision is not None:
        arguments += ["--revision", spec.model.revision]
    given = flags(spec.args or ())
    arguments += _parallelism(spec, given)
    if "--served-model-name" not in given:
        arguments += ["--served-model-name", spec.model.name]
    if not given & {"--enable-prompt-tokens-details", "--no-enable-prompt-tokens-details"}:
        arguments.append("--enable-prompt-tokens-details")
    arguments += spec.args or ()
    if pool is not None:
        arguments += ["--kv-transfer-config", wiring.transfer_config(wiring.connection(pool, context, spec.save))]
    return arguments


def _parallelism(spec: InferenceEngineSpec, given: set[str]) -> list[str]:
    shape, arguments = spec.parallelism, list[str]()
    for kind, ranks in (("tensor", shape.tensor), ("pipeline", shape.pipeline), ("data", shape.data)):
        if ranks > 1:
            arguments += [f"--{kind}-parallel-size", str(ranks)]
    if shape.expert:
        arguments.append("--enable-expert-parallel")
    if shape.nodes > 1:
        arguments += ["--nnodes", str(shape.nodes), "--master-addr", "$(LWS_LEADER_ADDRESS)"]
        if "--distributed-executor-backend" not in given:
            arguments += ["--distributed-executor-backend", "mp"]
    return arguments


def ending_seconds(pod: Json) -> tuple[int, int]:
    """How long the pod sleeps once it is told to end, and how long running requests may go on then. Depends on the merged grace period:
    the API server refuses a longer sleep."""
    grace = int(pod.get("terminationGracePeriodSeconds", _KUBERNETES_GRACE_SECONDS))
    return min(PRE_STOP_SECONDS, grace), max(0, grace - PRE_STOP_SECONDS - _SHUTDOWN_MARGIN_SECONDS)


def set_shutdown_timeout(pod: Json, spec: InferenceEngineSpec) -> None:
    """Let running requests finish before the kubelet kills: the default aborts them."""
    container = next(container for container in pod["containers"] if container["name"] == "engine")
    sleep, shutdown = ending_seconds(pod)
    hook = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {})
    if hook.get("seconds") == PRE_STOP_SECONDS:
        hook["seconds"] = sleep
    if "--shutdown-timeout" not in flags(spec.args or ()):
        container["args"] = ["--shutdown-timeout", str(shutdown), *container["args"]]


def flags(arguments: tuple[str, ...]) -> set[str]:
    """Names of the options given, as vLLM's parser reads them."""
    return {argument.split("=", 1)[0].replace("_", "-") for argument in arguments if argument.startswith("--")}


def serves_tls(spec: InferenceEngineSpec) -> bool:
    """Whether vLLM answers by HTTPS: it was given a certificate."""
    return any(flag.startswith("--ssl-certf") for flag in flags(spec.args or ()))


def environment(engine: InferenceEngine, pool: KVCachePool | None) -> list[Json]:
    """Ours first, so that the user's may refer to them as `$(POD_IP)`. Only the first few can be replaced; the rest is refused
    at admission."""
    user = [variable.model_dump(exclude_none=True) for variable in engine.spec.env or ()]
    taken = {variable["name"] for variable in user}
    # A user id without a passwd entry: libraries ask for HOME and USER.
    defaults = {"HOME": "/tmp", "USER": "vllm", "VLLM_NO_USAGE_STATS": "1", **model_environment(engine.spec)}
    own: list[Json] = [
        *podspec.environment({name: value for name, value in defaults.items() if name not in taken}),
        {"name": "POD_NAME", "valueFrom": podspec.downward("metadata.name")},
        {"name": "POD_NAMESPACE", "valueFrom": podspec.downward("metadata.namespace")},
        podspec.pod_ip(),
    ]
    if engine.spec.parallelism.nodes > 1 and "VLLM_HOST_IP" not in taken:
        own += podspec.environment({"VLLM_HOST_IP": "$(POD_IP)"})  # where the other pods of the group reach this one
    if pool is not None:
        own.append({"name": "EPOCHKV_ENGINE_NAME", "value": engine.metadata.name})
    return own + user


PERIOD_SECONDS: Final = 5
_BASE_SECONDS = 600
_BYTES_PER_SECOND = 256 * 2**20  # a network volume that is shared, or a download
_ACCELERATOR_BYTES = 192 * 2**30  # nobody says how much memory one has; few have more
_UNKNOWN_BYTES = 64 * 2**30
_PULL_SECONDS = 900  # to be scheduled, and to pull an image with vLLM in it
_PLAIN_RESOURCES = ("cpu", "memory", "ephemeral-storage")


def progress_deadline(pod: Json) -> int:
    """Seconds after which a rollout without progress counts as stuck: a pod may take as long as its startup probe, overridden or not,
    allows."""
    container = next(container for container in pod["containers"] if container["name"] == "engine")
    probe = container.get("startupProbe") or {}
    seconds = _number(probe, "initialDelaySeconds", 0) + _number(probe, "periodSeconds", 10) * _number(probe, "failureThreshold", 3)
    return min(_PULL_SECONDS + seconds, 2**31 - 1)


def _weights_bytes(spec: InferenceEngineSpec) -> int:
    """The most that the weights in one pod can take: the memory of its accelerators, or else its own."""
    given = spec.resources
    sections = [section for section in (given.limits, given.requests) if section] if given is not None else []
    amounts = {name: amount for section in reversed(sections) for name, amount in section.items()}  # limits win
    devices = sum(
        quantity.to_bytes(amount) for name, amount in amounts.items() if name not in _PLAIN_RESOURCES and not name.startswith("hugepages-")
    )
    if devices:
        return min(devices, spec.parallelism.ranks_per_pod) * _ACCELERATOR_BYTES
    return quantity.to_bytes(amounts["memory"]) if "memory" in amounts else _UNKNOWN_BYTES


def _number(probe: Json, key: str, default: int) -> int:
    """A number of a probe that a user may have overridden with anything; the API server rejects the rest."""
    value = probe.get(key, default)
    return value if isinstance(value, int) and value > 0 else default


_GRACE_SECONDS = 60
_SHM_BYTES_PER_RANK = 256 * 2**20  # 64 MiB is too little for one rank
_PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


def pod_template(engine: InferenceEngine, pool: KVCachePool | None, context: Context) -> Json:
    """`{metadata, spec}` of the pods that serve. Raises `InvalidTemplate`: an override in `spec.template` that belongs to the operator."""
    startup_seconds = _BASE_SECONDS + _weights_bytes(engine.spec) // _BYTES_PER_SECOND
    health = partial(podspec.http_probe, "/health", names.ENGINE_PORT, tls=serves_tls(engine.spec))
    container = {
        **command(engine, pool, context),
        "ports": [podspec.port("http", names.ENGINE_PORT)],
        "startupProbe": health(period=PERIOD_SECONDS, failures=-(-startup_seconds // PERIOD_SECONDS)),
        "readinessProbe": health(period=5, failures=3),
        "livenessProbe": health(period=10, failures=3),
        # While vLLM drains it answers new requests with nothing: traffic has to stop first.
        "lifecycle": {"preStop": {"sleep": {"seconds": PRE_STOP_SECONDS}}},
    }
    template = _finished(engine, pool, context, container)
    pod = template["spec"]
    set_shutdown_timeout(pod, engine.spec)
    if context.settings.gates and pool is not None and (engine.spec.serve or pool.spec.serve or ANYTHING).weights != ANY:
        pod["readinessGates"] = [*pod.get("readinessGates", ()), {"conditionType": GATE}]
    return template


def follower_template(engine: InferenceEngine, pool: KVCachePool | None, context: Context) -> Json:
    """`{metadata, spec}` of the pods of a group that only compute. Raises as `pod_template`."""
    template = _finished(engine, pool, context, follower_command(engine, pool, context))
    container = next(container for container in template["spec"]["containers"] if container["name"] == "engine")
    for probe in _PROBES:
        container.pop(probe, None)  # nothing listens; one that ends takes its group with it
    # The first pod finishes its requests, for which it needs the others.
    container["lifecycle"] = {"preStop": {"sleep": {"seconds": sum(ending_seconds(template["spec"]))}}}
    return template


def _finished(engine: InferenceEngine, pool: KVCachePool | None, context: Context, container: Json) -> Json:
    labels = {POOL_LABEL: "", **names.engine_labels(engine)}  # of all pods, so that one watch shows them
    template: Json = {"metadata": {"labels": labels}, "spec": _pod_spec(engine, pool, context, container)}
    if pool is not None:
        config = wiring.connection(pool, context, engine.spec.save)
        template["metadata"]["annotations"] = {names.CONNECTION_ANNOTATION: names.digest([config, context.credentials_revision])}
    return podspec.finish_pod(template, engine.spec.template, "engine", "spec.template")


def _pod_spec(engine: InferenceEngine, pool: KVCachePool | None, context: Context, runs: Json) -> Json:
    spec, security = engine.spec, engine.spec.pod_security or context.settings.pod_security
    shm = quantity.from_bytes(_SHM_BYTES_PER_RANK * spec.parallelism.ranks_per_pod)
    model, model_mounts = model_volumes(spec)
    mounts: list[Json] = [{"name": "tmp", "mountPath": "/tmp"}, {"name": "shm", "mountPath": "/dev/shm"}, *model_mounts]
    volumes: list[Json] = [{"name": "tmp", "emptyDir": {}}, {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": shm}}, *model]
    if pool is not None:
        mounts.append({"name": podspec.FENCE_VOLUME, "mountPath": names.CREDENTIALS_DIR, "readOnly": True})
        mode = 0o444 if security == "platform" else 0o440  # the group is fsGroup, which not every platform sets
        secret = {"secretName": names.component_name(pool.metadata.name, "fence"), "defaultMode": mode}
        volumes.append({"name": podspec.FENCE_VOLUME, "secret": secret})
    container: Json = {
        "name": "engine",
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "image": spec.image or context.settings.engine_image,
        **runs,
        "env": environment(engine, pool),
        "resources": _resources(spec, pool),
        "securityContext": podspec.container_security(),
        "volumeMounts": mounts,
    }
    if spec.image_pull_policy is not None:
        container["imagePullPolicy"] = spec.image_pull_policy
    pod = {
        **podspec.base_spec(security),
        "serviceAccountName": names.engine_account(engine.metadata.name),
        "terminationGracePeriodSeconds": _GRACE_SECONDS,
        "containers": [container],
        "volumes": volumes,
    }
    transport = wiring.transport(pool) if pool is not None else None
    return podspec.with_rdma(pod, transport.resource_name) if transport is not None and transport.protocol == "RDMA" else pod


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


PREFIX: Final = "leaderworkerset.sigs.k8s.io/"


def leader_worker_set(engine: InferenceEngine, pool: KVCachePool | None, context: Context) -> Json:
    """Body of the LeaderWorkerSet. Raises `KindNotServed`: the cluster has none; `InvalidTemplate`: as `pod_template`."""
    if "LeaderWorkerSet" not in context.served:
        raise KindNotServed(
            f"spec.parallelism.nodes is {engine.spec.parallelism.nodes}, and this cluster does not serve LeaderWorkerSets"
            " (leaderworkerset.x-k8s.io/v1), or the operator may not list them: install LeaderWorkerSet (https://lws.sigs.k8s.io); pods"
            " start within half a minute after that"
        )
    leader = pod_template(engine, pool, context)
    group = {
        "size": engine.spec.parallelism.nodes,
        "restartPolicy": "RecreateGroupOnPodRestart",  # a rank that was restarted alone finds nobody who waits for it
        "leaderTemplate": leader,
        "workerTemplate": follower_template(engine, pool, context),
    }
    leader["metadata"]["annotations"] = {**leader["metadata"].get("annotations", {}), names.HASH_ANNOTATION: names.digest(group)}
    return {
        "spec": {
            "replicas": engine.spec.replicas,
            "startupPolicy": "LeaderCreated",  # the first pod waits for the others before it is ready
            "rolloutStrategy": {"type": "RollingUpdate", "rollingUpdateConfiguration": engine.spec.update_strategy.model_dump()},
            "networkConfig": {"subdomainPolicy": "Shared"},
            "leaderWorkerTemplate": group,
        }
    }


def placement(engine: InferenceEngine) -> dict[str, str]:
    """Annotations of the template that LeaderWorkerSet reads on its own object, such as `exclusive-topology`."""
    template = engine.spec.template
    given = template.metadata.annotations if template is not None and template.metadata is not None else None
    return {key: value for key, value in (given or {}).items() if key.startswith(PREFIX)}


_LEADER = {f"{PREFIX}worker-index": "0"}


def workload_of(engine: InferenceEngine) -> tuple[str, str]:
    """Kind and name of what makes the pods. LeaderWorkerSet makes a Service of its own name, so it must not have the engine's."""
    name = engine.metadata.name
    return ("LeaderWorkerSet", f"{name}-nodes") if engine.spec.parallelism.nodes > 1 else ("Deployment", name)


def leader_selector(engine: InferenceEngine) -> dict[str, str]:
    """Selector of one pod of each replica: the one that answers requests and speaks with the hub."""
    selector = names.engine_selector(engine.metadata.name)
    return {**selector, **_LEADER} if engine.spec.parallelism.nodes > 1 else selector


def desired_engine(engine: InferenceEngine, pool: KVCachePool | None, context: Context) -> list[Json]:
    """Every object of an engine.

    `pool` is the pool that `spec.poolRef` names. None: no pool is named, or it does not exist *in a complete listing*. The engine
    then serves without connector. Passing None because the pool is merely not known yet would restart every engine twice.

    Raises:
        InvalidTemplate: an override in `spec.template` that belongs to the operator.
        KindNotServed: the engine spans nodes, and the cluster has no LeaderWorkerSet.
    """
    lost, selector = engine.spec.update_strategy.max_unavailable, names.engine_selector(engine.metadata.name)
    service = podspec.service(leader_selector(engine), "http", names.ENGINE_PORT)
    # A budget that allows nothing would keep nodes from being drained for ever.
    budget = podspec.budget(selector, 1 if is_zero(lost) else lost)
    return [
        names.engine_object(
            "ServiceAccount", engine, context, {"automountServiceAccountToken": False}, names.engine_account(engine.metadata.name)
        ),
        *(wiring.engine_policy(engine, pool, context) if pool is not None else []),  # no pod runs before it
        _workload(engine, pool, context),
        names.engine_object("Service", engine, context, {"spec": service}),
        names.engine_object("PodDisruptionBudget", engine, context, budget),
        *wiring.engine_monitor(engine, leader_selector(engine), context, tls=serves_tls(engine.spec)),
    ]


def _workload(engine: InferenceEngine, pool: KVCachePool | None, context: Context) -> Json:
    kind, name = workload_of(engine)
    if kind == "LeaderWorkerSet":
        return names.engine_object(kind, engine, context, leader_worker_set(engine, pool, context), name, placement(engine))
    template = pod_template(engine, pool, context)
    spec = {
        "replicas": engine.spec.replicas,
        "revisionHistoryLimit": 3,
        "progressDeadlineSeconds": progress_deadline(template["spec"]),
        "selector": {"matchLabels": names.engine_selector(engine.metadata.name)},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": engine.spec.update_strategy.model_dump()},
        "template": template,
    }
    return names.engine_object(kind, engine, context, {"spec": spec}, name)
