"""Specs of engines that must be accepted or refused, as in `corpus`."""

from tests.support.api.cases import engine

KV = ("belongs to the operator", "remove it from spec.args", "the pool named by spec.poolRef decides about KV")
ENV = ("PYTHONHASHSEED", "belong to the operator", "remove them from spec.env")
_OWNED = ("belongs to the operator", "use spec.model and spec.parallelism")
_SECRET = ("is a secret on a command line", "spec.env with valueFrom.secretKeyRef")
_BLANK = ("write --max-model-len=2048, or two items",)
_PODS = {"nodeSelector": {"gpu": "h100"}, "containers": [{"name": "engine", "volumeMounts": [{"name": "m", "mountPath": "/m"}]}]}
POOL_REF = {"poolRef": {"name": "policy"}}

ENGINE_CASES = [
    engine("minimal", {}),
    engine(
        "full",
        {
            **POOL_REF,
            "model": {"name": "Qwen/Qwen3-8B", "revision": "main", "source": "/models/qwen3.8b"},
            "image": "epochkv/engine:dev",
            "imagePullPolicy": "IfNotPresent",
            "replicas": 4,
            "parallelism": {"tensor": 2, "pipeline": 2, "nodes": 2},
            "updateStrategy": {"maxUnavailable": "25%", "maxSurge": 1},
            "args": ["--model-impl=vllm", "--enforce-eager", "--served-model-name", "a", "b"],
            "env": [
                {"name": "HF_HUB_OFFLINE", "value": "1"},
                {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token", "optional": True}}},
                {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
                {"name": "CPU", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}},
                {"name": "EMPTY"},
            ],
            "resources": {"limits": {"nvidia.com/gpu": 2, "memory": "64Gi"}, "requests": {"cpu": "500m"}},
            "template": {"metadata": {"labels": {"team": "rl"}, "annotations": {"note": "x"}}, "spec": _PODS},
        },
    ),
    engine("scaled-to-zero", {"replicas": 0}),
    engine("nulls", dict.fromkeys(("replicas", "parallelism", "updateStrategy", "env", "template"))),
    engine("no-resources", {"template": {"spec": {"containers": [{"name": "engine", "resources": {"$patch": "delete"}}]}}}),
    engine("surge-only", {"updateStrategy": {"maxUnavailable": 0, "maxSurge": "1%"}}),
    engine("model-in-a-claim", {"model": {"name": "m", "volume": {"claimName": "models", "path": "qwen/8b"}}}),
    engine("model-in-an-image", {"model": {"name": "m", "volume": {"image": {"reference": "r/m@sha256:0", "pullPolicy": "Never"}}}}),
    engine("model-cache", {"model": {"name": "m", "revision": "main", "cache": {"claimName": "hub"}}}),
    engine("kv-flags-that-are-fine", {"args": ["--kv-cache-dtype=fp8", "--kv-events-config={}", "--kv-sharing-fast-prefill"]}),
    engine("config-format", {"args": ["--config-format", "hf", "--compilation-config={}", "--tokenizer", "x"]}),
    engine("ec-without-pool", {"args": ["--ec-transfer-config={}"]}),
    engine("empty-lists", {"args": [], "env": []}),
    # the connector is ours
    *(
        engine(f"arg-{arg[2:12]}-{number}", {"args": ["--enforce-eager", arg]}, *KV)
        for number, arg in enumerate(
            ["--kv-transfer-config", "--kv-transfer-config.kv_connector=x", "--kv_tr={}", "--kv-offloading-size=4", "--config=/tmp/a.yaml"]
        )
    ),
    *(
        engine(f"owned-{number}", {"args": [arg]}, *_OWNED)
        for number, arg in enumerate(
            [
                *("--model", "--port=1", "--rev", "-tp=2", "--tensor_parallel_size", "-n", "--node_rank=1", "--headless"),
                *("-dp", "-dpl=2", "--data_parallel-rank=1", "--no-data-parallel-hybrid-lb", "-ep", "--enable_expert", "--no-enable-ex"),
            ]
        )
    ),
    engine("arg-is-named", {"args": ["--enforce-eager", "--kv_tr={}"]}, "spec.args[1]: ", "--kv_tr belongs to the operator"),
    *(
        engine(f"secret-{number}", {"args": ["--enforce-eager", *args]}, "spec.args[1]: ", *_SECRET)
        for number, args in enumerate([["--api-key=hunter2"], ["--api_key", "hunter2"], ["--api-key", "$(KEY)"], ["--hf-t=hunter2"]])
    ),
    *(
        engine(f"blank-{number}", {"args": ["--enforce-eager", arg]}, "spec.args[1]: ", *_BLANK)
        for number, arg in enumerate(["--max-model-len 2048", "--enforce-eager ", " --enforce-eager", "--x\t=1", "-q 2", "--a.b-c_d e"])
    ),
    engine("blanks-in-values", {"args": ["--chat-template", "{% if x %} --y {% endif %}", '--hf-overrides={"a": 1}', "a -b c", "- x", ""]}),
    engine("options-like-secrets", {"args": ["--api-server-count=2", "--hf-overrides={}", "--hf-config-path=x"]}),
    *(
        engine(f"env-{name}", {"env": [{"name": "OK", "value": "1"}, {"name": name, "value": "0"}]}, *ENV)
        for name in ("PYTHONHASHSEED", "MOONCAKE_MASTER", "MC_RPC_TIMEOUT_MS", "EPOCHKV_CONFIG", "POD_NAME", "POD_NAMESPACE", "POD_IP")
    ),
    *(
        engine(
            f"secret-{name}",
            {"env": [{"name": "OK", "value": "1"}, {"name": name, "value": "hunter2"}]},
            "spec.env[1]: ",
            f"{name} is a secret, for everybody to see who may read this object: give it with valueFrom.secretKeyRef",
        )
        for name in ("VLLM_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
    ),
    engine("secret-by-reference", {"env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}}]}),
    engine("env-from-elsewhere", {"env": [{"name": "MC_X", "valueFrom": {"fieldRef": {"fieldPath": "a"}}}]}, *ENV),
    engine("env-twice", {"env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]}, "Duplicate value", schema=True),
    engine("env-two", {"env": [{"name": "A", "value": "1", "valueFrom": {"fieldRef": {"fieldPath": "a"}}}]}, "both value and valueFrom"),
    engine("env-empty-source", {"env": [{"name": "A", "valueFrom": {}}]}, "exactly one of configMapKeyRef"),
    engine("env-bad-name", {"env": [{"name": "A B"}]}, "spec.env[0].name", "'A B' must be a variable's name"),
    engine("env-number", {"env": [{"name": "A", "value": 1}]}, "must be of type string", schema=True),
    engine("env-without-name", {"env": [{"value": "1"}]}, "name: Required value", schema=True),
    # pools
    engine("ec-with-pool", {**POOL_REF, "args": ["--ec-transfer-config={}"]}, "--ec-transfer-config", "remove it"),
    engine("pool-in-other-namespace", {"poolRef": {"name": "p", "namespace": "x"}}, 'unknown field "spec.poolRef.namespace"', schema=True),
    engine("pool-name-case", {"poolRef": {"name": "Policy"}}, "poolRef.name", "'Policy' must be the name of a KVCachePool"),
    engine("serve", {**POOL_REF, "serve": {"weights": "Converged", "strict": True}}),
    engine("serve-without-pool", {"serve": {"weights": "Converged"}}, "spec.serve needs spec.poolRef"),
    # the rest
    engine("model-missing", {"model": {}}, "model.name: Required value", schema=True),
    engine("model-empty", {"model": {"name": ""}}, "model.name", schema=True),
    engine("model-with-space", {"model": {"name": "a b"}}, "spec.model.name", "'a b' must be one word that does not begin with '-'"),
    engine("model-like-a-flag", {"model": {"name": "--port"}}, "spec.model.name", "'--port' must be one word"),
    engine("revision-with-space", {"model": {"name": "a", "revision": "a b"}}, "spec.model.revision", "a branch, a tag or a commit"),
    engine("source-with-space", {"model": {"name": "a", "source": "/a b"}}, "spec.model.source", "a path in the pod, or a repository"),
    engine("negative-replicas", {"replicas": -1}, "replicas", "greater than or equal to 0", schema=True),
    *(engine(f"no-{of}", {"parallelism": {of: 0}}, f"parallelism.{of}", schema=True) for of in ("tensor", "pipeline", "data", "nodes")),
    engine("uneven", {"parallelism": {"tensor": 2, "nodes": 4}}, "tensor x pipeline", "multiple of nodes (now 2 and 4)"),
    engine("split", {"parallelism": {"tensor": 2, "data": 2, "nodes": 4}}, "whole data-parallel ranks", "multiple of nodes (now 2 and 4)"),
    engine("wide", {"parallelism": {"tensor": 3, "data": 4, "expert": True, "nodes": 2}}),
    # rollouts
    engine("never-rolls", {"updateStrategy": {"maxUnavailable": 0}}, "maxUnavailable and maxSurge are both 0", "raise one"),
    engine("never-rolls-by-percent", {"updateStrategy": {"maxUnavailable": "0%", "maxSurge": "00%"}}, "are both 0"),
    engine("negative-surge", {"updateStrategy": {"maxSurge": -1}}, "a number of replicas from 0 on", "such as 1 or 25%"),
    engine("too-much-surge", {"updateStrategy": {"maxSurge": "101%"}}, "a percentage from 0% to 100%"),
    # where the model lies
    engine("volume-of-nothing", {"model": {"name": "m", "volume": {"path": "a"}}}, "exactly one of claimName and image"),
    engine("volume-of-two", {"model": {"name": "m", "volume": {"claimName": "a", "image": {"reference": "b"}}}}, "exactly one of"),
    engine("volume-and-source", {"model": {"name": "m", "source": "/m", "volume": {"claimName": "a"}}}, "remove source, revision"),
    engine("volume-and-cache", {"model": {"name": "m", "cache": {"claimName": "b"}, "volume": {"claimName": "a"}}}, "remove source"),
    engine("absolute-path", {"model": {"name": "m", "volume": {"claimName": "a", "path": "/x"}}}, "volume.path"),
    *(
        engine(
            f"path-upwards-{number}",
            {"model": {"name": "m", "volume": {"claimName": "a", "path": path}}},
            "spec.model.volume.path: ",
            f"'{path}' must be a folder in the volume, without '..'",
        )
        for number, path in enumerate(["../x", "..", "a/../../b", "a/.."])
    ),
    engine("dots-in-paths", {"model": {"name": "m", "volume": {"claimName": "a", "path": "..a/b../c..d/..."}}}),
    engine("claim-name", {"model": {"name": "m", "cache": {"claimName": "A_b"}}}, "claimName"),
    engine("role", {"role": "Producer"}, 'unknown field "spec.role"', schema=True),
    engine("pull-policy", {"imagePullPolicy": "Sometimes"}, "Unsupported value", schema=True),
    engine("image-with-space", {"image": "a b"}, "spec.image", "'a b' has a blank", "give one image"),
    engine("huge-memory", {"resources": {"limits": {"memory": "1e30"}}}, "memory", "'1e30' is above 1Pi"),
    engine("negative-memory", {"resources": {"limits": {"memory": "-1"}}}, "memory", "must be a Kubernetes quantity that is not negative"),
    engine("memory-in-words", {"resources": {"requests": {"memory": "much"}}}, "memory", "must be a Kubernetes quantity"),
    engine(
        "request-above-limit",
        {"resources": {"limits": {"memory": "32Gi", "cpu": 2}, "requests": {"memory": "33000Mi", "cpu": "500m"}}},
        "requests.memory is 33000Mi, above limits.memory, which is 32Gi: lower one or raise the other",
    ),
    engine(
        "requests-below-limits",
        {"resources": {"limits": {"memory": "32Gi", "cpu": 2}, "requests": {"memory": "32768Mi", "cpu": "500m", "nvidia.com/gpu": 1}}},
    ),
    engine("every-address", {"args": ["--host=::"]}),
    engine("one-address", {"args": ["--host=::1"]}, "--host belongs to the operator", "as with --host=::"),
    engine("args-number", {"args": [1]}, "must be of type string", schema=True),
    engine("owned-note", {"template": {"metadata": {"annotations": {"epochkv.io/pool-namespace": "x"}}}}, "belong", "prefix of your own"),
    engine("owned-label", {"template": {"metadata": {"labels": {"app.kubernetes.io/name": "x"}}}}, "belong", "prefix of your own"),
    engine("name-too-long", {}, "metadata.name must be at most 40 characters", name="e" * 41),
]
