"""vLLM's command line and environment: what the spec says, our defaults unless the user says otherwise, the user's, the connector."""

from __future__ import annotations

from epochkv_operator.api.engine import InferenceEngine, InferenceEngineSpec
from epochkv_operator.api.pool import KVCachePool
from epochkv_operator.planning import connection as wiring
from epochkv_operator.planning import podspec
from epochkv_operator.planning.context import Context, Json
from epochkv_operator.planning.engine.model import model_environment, model_path
from epochkv_operator.planning.names import ENGINE_PORT

PRE_STOP_SECONDS = 5
_SHUTDOWN_MARGIN_SECONDS = 15
_KUBERNETES_GRACE_SECONDS = 30  # where a template removes ours


def command(engine: InferenceEngine, pool: KVCachePool | None, context: Context) -> Json:
    """`command` and `args` of a pod that holds a whole replica, or of the first pod of a group."""
    spec = engine.spec
    arguments = ["--model", model_path(spec), *_shared(engine, pool, context)]
    if spec.parallelism.nodes > 1:
        arguments += ["--node-rank", "0"]
    return {"command": ["python3", "-m", "vllm.entrypoints.openai.api_server"], "args": arguments}


def follower_command(engine: InferenceEngine, pool: KVCachePool | None, context: Context) -> Json:
    """`command` and `args` of the other pods of a group: ranks only, which the first pod drives. LeaderWorkerSet sets the variables."""
    arguments = ["serve", model_path(engine.spec), "--headless", *_shared(engine, pool, context), "--node-rank", "$(LWS_WORKER_INDEX)"]
    return {"command": ["python3", "-m", "vllm.entrypoints.cli.main"], "args": arguments}


def _shared(engine: InferenceEngine, pool: KVCachePool | None, context: Context) -> list[str]:
    """What all pods of a replica are told."""
    spec = engine.spec
    arguments = ["--port", str(ENGINE_PORT)]
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
        arguments += ["--kv-transfer-config", wiring.transfer_config(wiring.connection(pool, context))]
    return arguments


def _parallelism(spec: InferenceEngineSpec, given: set[str]) -> list[str]:
    shape, arguments = spec.parallelism, list[str]()
    if shape.tensor > 1:
        arguments += ["--tensor-parallel-size", str(shape.tensor)]
    if shape.pipeline > 1:
        arguments += ["--pipeline-parallel-size", str(shape.pipeline)]
    if shape.nodes > 1:
        arguments += ["--nnodes", str(shape.nodes), "--master-addr", "$(LWS_LEADER_ADDRESS)"]
        if "--distributed-executor-backend" not in given:
            arguments += ["--distributed-executor-backend", "mp"]
    return arguments


def shutdown_seconds(pod: Json) -> int:
    """How long running requests may go on once the pod is told to end. Depends on the merged grace period."""
    grace = pod.get("terminationGracePeriodSeconds", _KUBERNETES_GRACE_SECONDS)
    return max(0, int(grace) - PRE_STOP_SECONDS - _SHUTDOWN_MARGIN_SECONDS)


def set_shutdown_timeout(pod: Json, spec: InferenceEngineSpec) -> None:
    """Let running requests finish before the kubelet kills: the default aborts them."""
    if "--shutdown-timeout" in flags(spec.args or ()):
        return
    container = next(container for container in pod["containers"] if container["name"] == "engine")
    container["args"] = ["--shutdown-timeout", str(shutdown_seconds(pod)), *container["args"]]


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
        own += podspec.environment(wiring.client_environment(pool))
    return own + user
