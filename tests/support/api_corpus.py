"""Specs that must be accepted or refused, with what the refusal has to say. Judged by a real API server and by the models alike.

The list is written by hand from the API's promises; nothing in it is computed from the code.
"""

from __future__ import annotations

from tests.support.api.cases import EXTERNAL, LOCAL, MOONCAKE, STORE, Change, Json, engine, etcd, master, mooncake, pool

GONE_OF_POOLS: dict[str, list[Json]] = {
    "weightsVersion": [{"local": LOCAL, "resetEpoch": 1, "weightsVersion": value} for value in ("step-100", "", "a\nb", 7)],
    "weightsReady": [{"local": LOCAL, "weightsReady": "step-100"}],
    "reset.joinAfterSeconds": [{"local": LOCAL, "reset": {"joinAfterSeconds": value}} for value in (0, 60, "60")],
    "reset.onLocalReset": [{"local": LOCAL, "reset": {"onLocalReset": value}} for value in ("Private", "Propose", "propose")],
}
"""Specs with a field of an earlier version, by its path. Only admission refuses these: the models read what was stored before."""

POOL_CASES = [
    pool("local-only", {"local": LOCAL}),
    pool("local-integer", {"local": {"capacity": 1073741824}}),
    pool("local-decimal", {"local": {"capacity": "1.5Gi"}}),
    pool("local-exponent", {"local": {"capacity": "1e9"}}),
    pool("mooncake-only", {"distributed": MOONCAKE}),
    pool("external-only", {"distributed": EXTERNAL}),
    pool("external-etcd", {"distributed": {"external": {"masterAddress": "etcd://a:2379;b:2379"}}}),
    pool("external-metadata", {"distributed": {"external": {"masterAddress": "m:50051", "metadataServer": "http://m:8080/metadata"}}}),
    pool("both-tiers", {"local": LOCAL, "distributed": MOONCAKE, "resetEpoch": 7, "reset": {"leaseSeconds": 5}}),
    pool("empty-nested-objects", {"local": LOCAL, "reset": {}, "networkPolicy": {}}),
    pool("largest-epoch", {"local": LOCAL, "resetEpoch": 9007199254740991}),
    pool("three-masters-with-etcd", master(replicas=3, highAvailability=etcd("e1:2379", "e2:2379"))),
    pool("one-master-with-etcd", master(highAvailability=etcd("e1:2379"))),
    pool("rdma", mooncake(transport={"protocol": "RDMA", "devices": ["mlx5_0", "mlx5_1"]})),
    pool("policy-off", {"local": LOCAL, "networkPolicy": {"mode": "Disabled"}}),
    pool("master-template", master(template={"spec": {"nodeSelector": {"a": "b"}}, "metadata": {"labels": {"team": "x"}}})),
    pool("store-template", mooncake(store={**STORE, "template": {"spec": {"tolerations": [{"operator": "Exists"}]}}})),
    pool("store-image", mooncake(image="registry.example/mooncake@sha256:0123")),
    pool("long-name", {"local": LOCAL}, name="p" + "o" * 38 + "l"),
    *(pool(f"reclaim-{policy}", {**mooncake(), "reset": {"reclaimPolicy": policy}}) for policy in ("Delete", "RemoveAll", "Retain")),
    pool("retain-external", {"distributed": EXTERNAL, "reset": {"reclaimPolicy": "Retain"}}),
    pool("wipe-without-store", {"local": LOCAL, "reset": {"reclaimPolicy": "RemoveAll"}}),
    pool("keys-generation", {"local": LOCAL, "keys": {"generation": 3}}),
    pool("keys-empty", {"local": LOCAL, "keys": {}}),
    # what other fields have replaced
    *(
        pool(f"gone-{path}-{number}", spec, f"spec.{path}: Forbidden: spec.{path} is no longer supported: ", "remove it", stored=True)
        for path, specs in GONE_OF_POOLS.items()
        for number, spec in enumerate(specs)
    ),
    pool("gone-of-another-type", {"local": LOCAL, "weightsVersion": {"a": 1}}, "spec.weightsVersion", schema=True),
    # reclaim, keys
    pool(
        "wipe-of-a-shared-store",
        {"distributed": EXTERNAL, "reset": {"reclaimPolicy": "RemoveAll"}},
        "RemoveAll would wipe a store that others may share",
        "use Delete or Retain",
    ),
    pool("reclaim-enum", {"local": LOCAL, "reset": {"reclaimPolicy": "delete"}}, "Unsupported value", '"Retain"', schema=True),
    pool("negative-generation", {"local": LOCAL, "keys": {"generation": -1}}, "greater than or equal to 0", schema=True),
    # L2 kinds and tiers
    pool("no-tier", {}, "neither local nor distributed", "local.capacity"),
    pool("epoch-only", {"resetEpoch": 1}, "neither local nor distributed"),
    pool("both-kinds", {"distributed": {**MOONCAKE, **EXTERNAL}}, "both mooncake and external", "keep the one"),
    pool("neither-kind", {"distributed": {}}, "neither mooncake nor external", "set one of them"),
    pool("neither-kind-but-local", {"local": LOCAL, "distributed": {}}, "neither mooncake nor external"),
    pool("no-spec", None, "spec: Required value", schema=True),
    # high availability
    pool(
        "three-masters-alone",
        master(replicas=3),
        "spec.distributed.mooncake.master.replicas is 3 but highAvailability.backend is None",
        "set backend: Etcd or replicas: 1",
    ),
    pool("two-masters-backend-none", master(replicas=2, highAvailability={"backend": "None"}), "master.replicas is 2", "set backend: Etcd"),
    pool("etcd-without-endpoints", master(highAvailability={"backend": "Etcd"}), "highAvailability.etcd", "etcd.endpoints"),
    pool("endpoints-without-etcd", master(highAvailability={"etcd": {"endpoints": ["a:1"]}}), "highAvailability.etcd", "backend: None"),
    pool("etcd-empty-list", master(highAvailability={"backend": "Etcd", "etcd": {"endpoints": []}}), "at least 1", schema=True),
    pool(
        "etcd-with-scheme", master(highAvailability=etcd("http://a:2379")), "endpoints[0]", "'http://a:2379' must be host:port", stored=True
    ),
    pool("etcd-without-port", master(highAvailability=etcd("a")), "endpoints[0]", "'a' must be host:port", stored=True),
    pool("etcd-twice", master(highAvailability=etcd("a:1", "a:1")), "Duplicate value", schema=True),
    pool("unknown-backend", master(highAvailability={"backend": "KubernetesLease"}), "Unsupported value", '"Etcd"', schema=True),
    pool("no-master", master(replicas=0), "greater than or equal to 1", schema=True),
    pool("six-masters", master(replicas=6, highAvailability=etcd("a:1")), "less than or equal to 5", schema=True),
    # sizes
    pool("no-segment-size", {"distributed": {"mooncake": {"store": {}}}}, "segmentSize: Required value", schema=True),
    pool("no-store", {"distributed": {"mooncake": {}}}, "store: Required value", schema=True),
    pool("zero-segment", mooncake(store={"segmentSize": 0}), "segmentSize", "must be a Kubernetes quantity of at least 1Mi, such as 64Gi"),
    pool("negative-segment", mooncake(store={"segmentSize": "-5Gi"}), "segmentSize", "at least 1Mi"),
    pool("forgotten-unit", {"local": {"capacity": "64"}}, "capacity", "'64' must be", "at least 1Mi, such as 64Gi"),
    pool("wrong-unit", {"local": {"capacity": "64GB"}}, "capacity", "a Kubernetes quantity"),
    pool("words-as-size", {"local": {"capacity": "lots"}}, "capacity", "a Kubernetes quantity"),
    pool("empty-size", {"local": {"capacity": ""}}, "capacity", "a Kubernetes quantity"),
    pool("largest-size", {"local": {"capacity": "1Pi"}}),
    *(
        pool(f"huge-size-{size}", {"local": {"capacity": size}}, f"'{size}' is above 1Pi: check the unit", stored=True)
        for size in ("1e30", "2Pi", 2**50 + 1)
    ),
    pool("huge-segment", mooncake(store={"segmentSize": "1Ei"}), "segmentSize", "'1Ei' is above 1Pi", stored=True),
    pool("no-capacity", {"local": {}}, "capacity: Required value", schema=True),
    pool("boolean-size", {"local": {"capacity": True}}, "capacity", schema=True),
    pool("no-store-replica", mooncake(store={**STORE, "replicas": 0}), "greater than or equal to 1", schema=True),
    # transport
    pool("rdma-without-devices", mooncake(transport={"protocol": "RDMA"}), "transport.devices", "mlx5_0"),
    pool("rdma-empty-devices", mooncake(transport={"protocol": "RDMA", "devices": []}), "transport.devices", "protocol: TCP"),
    pool("tcp-with-devices", mooncake(transport={"devices": ["mlx5_0"]}), "devices is only for RDMA"),
    pool("unknown-protocol", mooncake(transport={"protocol": "rdma"}), "Unsupported value", schema=True),
    pool("device-twice", mooncake(transport={"protocol": "RDMA", "devices": ["a", "a"]}), "Duplicate value", schema=True),
    # external
    pool("external-without-address", {"distributed": {"external": {}}}, "masterAddress: Required value", schema=True),
    *(
        pool(
            f"external-address-{address}",
            {"distributed": {"external": {"masterAddress": address}}},
            "spec.distributed.external.masterAddress",
            f"'{address}' must be host:port, such as mooncake.example:50051, or etcd://host:port;host:port",
            stored=True,
        )
        for address in ("host", "a b:1", "host:port", "host:0", "host:65536", "http://host:1", "host:50051/x", "etcd://a:1;b", ":50051")
    ),
    *(
        pool(f"external-address-{address}", {"distributed": {"external": {"masterAddress": address}}})
        for address in ("10.0.0.7:50051", "[fd00::7]:50051", "m-0.m.ns.svc.cluster.local:65535", "etcd://e-0.example:2379")
    ),
    *(
        pool(f"metadata-{server}", {"distributed": {"external": {"masterAddress": "m:1", "metadataServer": server}}})
        for server in ("P2PHANDSHAKE", "http://m:8080/metadata", "etcd://e0:2379;e1:2379", "redis://r:6379", "e0:2379,e1:2379")
    ),
    *(
        pool(
            f"metadata-{server}",
            {"distributed": {"external": {"masterAddress": "m:1", "metadataServer": server}}},
            "metadataServer",
            "must be P2PHANDSHAKE, or host:port",
            stored=True,
        )
        for server in ("p2p", "http://m/metadata", "http://user:secret@m:8080/metadata")
    ),
    # epochs and leases
    pool("negative-epoch", {"local": LOCAL, "resetEpoch": -1}, "resetEpoch", "greater than or equal to 0", schema=True),
    pool("huge-epoch", {"local": LOCAL, "resetEpoch": 2**53}, "resetEpoch", "less than or equal to", schema=True),
    pool("text-epoch", {"local": LOCAL, "resetEpoch": "1"}, "resetEpoch", "must be of type integer", schema=True),
    pool("fraction-epoch", {"local": LOCAL, "resetEpoch": 1.5}, "resetEpoch", "must be of type integer", schema=True),
    pool("no-lease", {"local": LOCAL, "reset": {"leaseSeconds": 0}}, "leaseSeconds", "greater than or equal to 1", schema=True),
    # unknown fields, also such that other systems have
    pool("unknown-in-spec", {"local": LOCAL, "resetEpok": 1}, 'unknown field "spec.resetEpok"', schema=True),
    pool("snake-case", {"local": LOCAL, "reset_epoch": 1}, 'unknown field "spec.reset_epoch"', schema=True),
    pool("unknown-nested", {"local": {**LOCAL, "evictionPolicy": "LRU"}}, 'unknown field "spec.local.evictionPolicy"', schema=True),
    pool("unknown-reset", {"local": LOCAL, "reset": {"reclaim": "Delete"}}, 'unknown field "spec.reset.reclaim"', schema=True),
    pool("external-engines", {"local": LOCAL, "externalEngines": "Enabled"}, 'unknown field "spec.externalEngines"', schema=True),
    pool("unknown-store", mooncake(store={**STORE, "ssd": {}}), 'unknown field "spec.distributed.mooncake.store.ssd"', schema=True),
    pool("unknown-in-template", master(template={"speck": {}}), "unknown field", "speck", schema=True),
    pool("mode-enum", {"local": LOCAL, "networkPolicy": {"mode": "On"}}, "Unsupported value", schema=True),
    pool("owned-label", master(template={"metadata": {"labels": {"epochkv.io/pool": "x"}}}), "belong", "prefix of your own"),
    pool("name-too-long", {"local": LOCAL}, "metadata.name must be at most 40 characters", name="p" * 41),
    pool("name-with-dot", {"local": LOCAL}, "metadata.name must be", name="a.b"),
    pool("name-with-digit-first", {"local": LOCAL}, "metadata.name must be", "starting with a letter", name="1a"),
]

_KV = ("belongs to the operator", "remove it from spec.args", "the pool named by spec.poolRef decides about KV")
_ENV = ("PYTHONHASHSEED", "belong to the operator", "remove them from spec.env")
_OWNED = ("belongs to the operator", "use spec.model and spec.parallelism")
_SECRET = ("is a secret on a command line", "spec.env with valueFrom.secretKeyRef")
_BLANK = ("write --max-model-len=2048, or two items",)
_POOL_REF = {"poolRef": {"name": "policy"}}

ENGINE_CASES = [
    engine("minimal", {}),
    engine(
        "full",
        {
            **_POOL_REF,
            "model": {"name": "Qwen/Qwen3-8B", "revision": "main", "source": "/models/qwen3.8b"},
            "image": "epochkv/engine:dev",
            "imagePullPolicy": "IfNotPresent",
            "replicas": 4,
            "parallelism": {"tensor": 2},
            "args": [
                "--max-model-len=32768",
                "--enforce-eager",
                "--kv-cache-dtype",
                "fp8",
                "--served-model-name",
                "a",
                "b",
                "--model-impl=vllm",
            ],
            "env": [
                {"name": "HF_HUB_OFFLINE", "value": "1"},
                {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token", "optional": True}}},
                {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
                {"name": "CPU", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}},
                {"name": "EMPTY"},
            ],
            "resources": {"limits": {"nvidia.com/gpu": 2, "memory": "64Gi"}, "requests": {"cpu": "500m"}},
            "template": {
                "metadata": {"labels": {"team": "rl"}, "annotations": {"note": "x"}},
                "spec": {
                    "nodeSelector": {"gpu": "h100"},
                    "containers": [{"name": "engine", "volumeMounts": [{"name": "m", "mountPath": "/m"}]}],
                },
            },
        },
    ),
    engine("scaled-to-zero", {"replicas": 0}),
    engine("kv-flags-that-are-fine", {"args": ["--kv-cache-dtype=fp8", "--kv-events-config={}", "--kv-sharing-fast-prefill"]}),
    engine("config-format", {"args": ["--config-format", "hf", "--compilation-config={}", "--tokenizer", "x"]}),
    engine("ec-without-pool", {"args": ["--ec-transfer-config={}"]}),
    engine("empty-lists", {"args": [], "env": []}),
    # the connector is ours
    *(
        engine(f"arg-{arg[2:12]}-{number}", {"args": ["--enforce-eager", arg]}, *_KV)
        for number, arg in enumerate(
            [
                "--kv-transfer-config",
                '--kv-transfer-config={"kv_connector":"x"}',
                "--kv_transfer_config={}",
                "--kv-transfer-config.kv_connector=x",
                "--kv-t",
                "--kv_tr={}",
                "--kv-transfer",
                "--kv-offloading-size=4",
                "--kv-offloading-backend",
                "--kv_offloading_size",
                "--kv-o=4",
                "--config",
                "--config=/tmp/a.yaml",
            ]
        )
    ),
    *(
        engine(f"owned-{number}", {"args": [arg]}, *_OWNED)
        for number, arg in enumerate(
            [
                "--model",
                "--model=x",
                "--port=1",
                "--port",
                "--por=1",
                "--host=127.0.0.1",
                "--revision=x",
                "--rev",
                "-tp",
                "-tp=2",
                "--tensor-parallel-size=2",
                "--tensor_parallel_size",
                "--tens=2",
                "--uds=/tmp/s",
            ]
        )
    ),
    engine("arg-is-named", {"args": ["--enforce-eager", "--kv_tr={}"]}, "spec.args[1]: ", "--kv_tr belongs to the operator"),
    *(
        engine(f"secret-{number}", {"args": ["--enforce-eager", *args]}, "spec.args[1]: ", *_SECRET, stored=True)
        for number, args in enumerate(
            [
                ["--api-key=hunter2"],
                ["--api-key", "hunter2"],
                ["--api_key", "hunter2"],
                ["--api-k=hunter2"],
                ["--api-key", "$(KEY)"],
                ["--hf-token=hunter2"],
                ["--hf_token", "hunter2"],
                ["--hf-t=hunter2"],
                ["--hf-token"],
            ]
        )
    ),
    *(
        engine(f"blank-{number}", {"args": ["--enforce-eager", arg]}, "spec.args[1]: ", *_BLANK, stored=True)
        for number, arg in enumerate(["--max-model-len 2048", "--enforce-eager ", " --enforce-eager", "--x\t=1", "-n 2", "--a.b-c_d e"])
    ),
    engine("blanks-in-values", {"args": ["--chat-template", "{% if x %} --y {% endif %}", '--hf-overrides={"a": 1}', "a -b c", "- x", ""]}),
    engine("options-like-secrets", {"args": ["--api-server-count=2", "--hf-overrides={}", "--hf-config-path=x"]}),
    *(
        engine(f"env-{name}", {"env": [{"name": "OK", "value": "1"}, {"name": name, "value": "0"}]}, *_ENV)
        for name in (
            "PYTHONHASHSEED",
            "MOONCAKE_MASTER",
            "MOONCAKE_CONFIG_PATH",
            "MC_RPC_TIMEOUT_MS",
            "MC_STORE_CLUSTER_ID",
            "EPOCHKV_CONFIG",
            "EPOCHKV_ENGINE_NAME",
            "POD_NAME",
            "POD_NAMESPACE",
            "POD_IP",
        )
    ),
    engine("env-from-elsewhere", {"env": [{"name": "MC_X", "valueFrom": {"fieldRef": {"fieldPath": "a"}}}]}, *_ENV),
    engine("env-twice", {"env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]}, "Duplicate value", schema=True),
    engine(
        "env-two-sources", {"env": [{"name": "A", "value": "1", "valueFrom": {"fieldRef": {"fieldPath": "a"}}}]}, "both value and valueFrom"
    ),
    engine("env-empty-source", {"env": [{"name": "A", "valueFrom": {}}]}, "exactly one of configMapKeyRef"),
    engine("env-bad-name", {"env": [{"name": "A B"}]}, "spec.env[0].name", "'A B' must be a variable's name"),
    engine("env-number", {"env": [{"name": "A", "value": 1}]}, "must be of type string", schema=True),
    engine("env-without-name", {"env": [{"value": "1"}]}, "name: Required value", schema=True),
    # pools, and what other fields have replaced
    engine("ec-with-pool", {**_POOL_REF, "args": ["--ec-transfer-config={}"]}, "--ec-transfer-config", "remove it"),
    *(
        engine(f"gone-weightsSource-{value}", {"weightsSource": value}, "spec.weightsSource: Forbidden: ", "remove it", stored=True)
        for value in ("Model", "Pushed", "pushed")
    ),
    engine("pool-in-other-namespace", {"poolRef": {"name": "p", "namespace": "x"}}, 'unknown field "spec.poolRef.namespace"', schema=True),
    engine("pool-name-empty", {"poolRef": {"name": ""}}, "poolRef.name", schema=True),
    engine("pool-name-case", {"poolRef": {"name": "Policy"}}, "poolRef.name", "'Policy' must be the name of a KVCachePool"),
    # the rest
    engine("model-missing", {"model": {}}, "model.name: Required value", schema=True),
    engine("model-empty", {"model": {"name": ""}}, "model.name", schema=True),
    engine("model-with-space", {"model": {"name": "a b"}}, "spec.model.name", "'a b' must be one word that does not begin with '-'"),
    engine("model-like-a-flag", {"model": {"name": "--port"}}, "spec.model.name", "'--port' must be one word"),
    engine("revision-with-space", {"model": {"name": "a", "revision": "a b"}}, "spec.model.revision", "a branch, a tag or a commit"),
    engine("source-with-space", {"model": {"name": "a", "source": "/a b"}}, "spec.model.source", "a path in the pod, or a repository"),
    engine("negative-replicas", {"replicas": -1}, "replicas", "greater than or equal to 0", schema=True),
    engine("no-tensor-rank", {"parallelism": {"tensor": 0}}, "parallelism.tensor", schema=True),
    engine("pipeline", {"parallelism": {"pipeline": 2}}, 'unknown field "spec.parallelism.pipeline"', schema=True),
    engine("role", {"role": "Producer"}, 'unknown field "spec.role"', schema=True),
    engine("command", {"command": ["vllm"]}, 'unknown field "spec.command"', schema=True),
    engine("pull-policy", {"imagePullPolicy": "Sometimes"}, "Unsupported value", schema=True),
    engine("image-with-space", {"image": "a b"}, "spec.image", "'a b' has a blank", "give one image"),
    engine("huge-memory", {"resources": {"limits": {"memory": "1e30"}}}, "memory", "'1e30' is above 1Pi", stored=True),
    engine("negative-memory", {"resources": {"limits": {"memory": "-1"}}}, "memory", "must be a Kubernetes quantity that is not negative"),
    engine("memory-in-words", {"resources": {"requests": {"memory": "much"}}}, "memory", "must be a Kubernetes quantity"),
    engine("resource-claims", {"resources": {"claims": []}}, 'unknown field "spec.resources.claims"', schema=True),
    engine("args-as-text", {"args": "--enforce-eager"}, "must be of type array", schema=True),
    engine("args-number", {"args": [1]}, "must be of type string", schema=True),
    engine("owned-label", {"template": {"metadata": {"labels": {"app.kubernetes.io/name": "x"}}}}, "belong", "prefix of your own"),
    engine("name-too-long", {}, "metadata.name must be at most 40 characters", name="e" * 41),
]

CASES = POOL_CASES + ENGINE_CASES
_ETCD = {"replicas": 3, "highAvailability": etcd("a:1")}


def pool_change(id: str, old: Json, new: Json, *says: str) -> Change:
    return Change(id, "KVCachePool", {"local": LOCAL, **old}, {"local": LOCAL, **new}, says or None)


def engine_change(id: str, old: Json, new: Json, *says: str) -> Change:
    model = {"model": {"name": "tiny"}}
    return Change(id, "InferenceEngine", {**model, **old}, {**model, **new}, says or None)


CHANGES = [
    pool_change("raise-epoch", {"resetEpoch": 1}, {"resetEpoch": 9}),
    pool_change("keep-epoch", {"resetEpoch": 3}, {"resetEpoch": 3, "reset": {"reclaimPolicy": "Retain"}}),
    pool_change("raise-lease", {"reset": {"leaseSeconds": 10}}, {"reset": {"leaseSeconds": 20}}),
    pool_change(
        "lower-lease", {"reset": {"leaseSeconds": 40}}, {"reset": {"leaseSeconds": 39}}, "spec.reset.leaseSeconds never goes down: it is 40"
    ),
    pool_change("drop-long-lease", {"reset": {"leaseSeconds": 40}}, {}, "spec.reset.leaseSeconds never goes down"),
    pool_change("lower-epoch", {"resetEpoch": 7}, {"resetEpoch": 6}, "spec.resetEpoch", "it is 7; to reset, set 8 or higher"),
    pool_change("remove-epoch", {"resetEpoch": 7}, {}, "spec.resetEpoch", "it is 7"),
    *(
        pool_change(f"set-{path}", {"resetEpoch": 1}, {"resetEpoch": 2, **specs[0]}, f"spec.{path} is no longer supported: ", "remove it")
        for path, specs in GONE_OF_POOLS.items()
    ),
    engine_change("set-weightsSource", {}, {"weightsSource": "Model"}, "spec.weightsSource is no longer supported: ", "remove it"),
    pool_change("rotate-keys", {"keys": {"generation": 1}}, {"keys": {"generation": 2}}),
    pool_change(
        "rotate-keys-back",
        {"keys": {"generation": 2}},
        {"keys": {"generation": 1}},
        "spec.keys.generation never goes down: it is 2",
        "set 3",
    ),
    pool_change("forget-generation", {"keys": {"generation": 2}}, {}, "spec.keys.generation never goes down"),
    pool_change("change-reclaim", {"reset": {"reclaimPolicy": "Delete"}}, {"reset": {"reclaimPolicy": "Retain"}}),
    pool_change("remove-local", {"distributed": MOONCAKE}, {"distributed": MOONCAKE}),
    pool_change("add-distributed", {}, {"distributed": MOONCAKE}),
    pool_change("remove-distributed", {"distributed": MOONCAKE}, {}),
    pool_change(
        "change-kind", {"distributed": MOONCAKE}, {"distributed": EXTERNAL}, "cannot change between mooncake and external", "new pool"
    ),
    pool_change("change-kind-back", {"distributed": EXTERNAL}, {"distributed": MOONCAKE}, "cannot change between mooncake and external"),
    pool_change("scale-store", mooncake(), mooncake(store={**STORE, "replicas": 3})),
    pool_change("become-available", mooncake(), mooncake(master=_ETCD)),
    pool_change("masters-without-etcd", mooncake(master=_ETCD), mooncake(master={"replicas": 3}), "master.replicas is 3"),
    engine_change("scale", {"replicas": 1}, {"replicas": 3}),
    engine_change("change-image", {"image": "a"}, {"image": "b"}),
    engine_change("move-pool", _POOL_REF, {"poolRef": {"name": "other"}}, "spec.poolRef is immutable", "new InferenceEngine"),
    engine_change("add-pool", {}, _POOL_REF, "spec.poolRef cannot be added or removed"),
    engine_change("remove-pool", _POOL_REF, {}, "spec.poolRef cannot be added or removed"),
    engine_change("sneak-in-arg", {}, {"args": ["--kv-transfer-config={}"]}, *_KV),
    engine_change("sneak-in-seed", {}, {"env": [{"name": "PYTHONHASHSEED", "value": "0"}]}, *_ENV),
]
