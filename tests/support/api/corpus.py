"""Specs that must be accepted or refused, with what the refusal has to say. Judged by a real API server.

The list is written by hand from the API's promises; nothing in it is computed from the code.
"""

from tests.support.api.cases import EXTERNAL, LOCAL, MOONCAKE, STORE, Change, Json, etcd, external, master, mooncake, pool
from tests.support.api.engines import ENGINE_CASES, ENV, KV, POOL_REF

RDMA = {"protocol": "RDMA", "devices": ["mlx5_0"]}
PRIVILEGED = {"name": "store", "securityContext": {"privileged": True, "allowPrivilegeEscalation": {"$patch": "delete"}}}
HOST_AND_PORT = "must be host:port, such as mooncake.example:50051, or etcd://host:port;host:port"

POOL_CASES = [
    *(pool(f"local-{capacity}", {"local": {"capacity": capacity}}) for capacity in (1073741824, "1.5Gi", "1e9", "1Pi")),
    pool("external-cluster", external("etcd://a:2379;b:2379", clusterId="shared")),
    pool("rdma-plugin", mooncake(transport={**RDMA, "resourceName": "rdma/hca_shared_devices_a", "gidIndex": 3})),
    pool("plugin-with-tcp", mooncake(transport={"resourceName": "rdma/hca"}), "only for RDMA"),
    pool("gid-with-tcp", mooncake(transport={"gidIndex": 0}), "only for RDMA"),
    pool("resource-without-domain", mooncake(transport={**RDMA, "resourceName": "hca"}), "resourceName", schema=True),
    pool("both-tiers", {"local": LOCAL, "distributed": MOONCAKE, "resetEpoch": 7, "reset": {"leaseSeconds": 5}}),
    *(pool(f"nested-{given}", {"local": LOCAL, "reset": given, "networkPolicy": given}) for given in ({}, None)),
    pool("largest-epoch", {"local": LOCAL, "resetEpoch": 9007199254740991}),
    pool("three-masters-with-etcd", master(replicas=3, highAvailability=etcd("e1:2379", "e2:2379"))),
    *(pool(f"serve-{weights}", {"local": LOCAL, "serve": {"weights": weights}}) for weights in ("Any", "Converged", "step 42", "3f2a9c1e")),
    pool("serve-in-small-letters", {"local": LOCAL, "serve": {"weights": "converged"}}, "'converged' must be written Any or Converged"),
    pool("serve-nothing", {"local": LOCAL, "serve": {"weights": ""}}, "spec.serve.weights", schema=True),
    pool("policy-off", {"local": LOCAL, "networkPolicy": {"mode": "Disabled"}}),
    pool("master-template", master(template={"spec": {"nodeSelector": {"a": "b"}}, "metadata": {"labels": {"team": "x"}}})),
    pool("store-template", mooncake(store={**STORE, "template": {"spec": {"tolerations": [{"operator": "Exists"}]}}})),
    pool("store-privileged", mooncake(store={**STORE, "template": {"spec": {"containers": [PRIVILEGED]}}})),
    pool("template-of-nothing", master(template={"spec": {"$patch": "delete"}})),
    pool("store-image", mooncake(image="registry.example/mooncake@sha256:0123")),
    pool("allowed-labels", mooncake() | {"allowedNamespaces": {"selector": {"matchExpressions": [{"key": "x", "operator": "Exists"}]}}}),
    pool("long-name", {"local": LOCAL}, name="p" + "o" * 38 + "l"),
    *(pool(f"reclaim-{policy}", {**mooncake(), "reset": {"reclaimPolicy": policy}}) for policy in ("Delete", "RemoveAll", "Retain")),
    pool("retain-external", {"distributed": EXTERNAL, "reset": {"reclaimPolicy": "Retain"}}),
    pool("wipe-without-store", {"local": LOCAL, "reset": {"reclaimPolicy": "RemoveAll"}}),
    pool("keys-generation", {"local": LOCAL, "keys": {"generation": 3}}),
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
    pool("both-kinds", {"distributed": {**MOONCAKE, **EXTERNAL}}, "both mooncake and external", "keep the one"),
    pool("neither-kind", {"distributed": {}}, "neither mooncake nor external", "set one of them"),
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
    pool("etcd-with-scheme", master(highAvailability=etcd("http://a:2379")), "endpoints[0]", "'http://a:2379' must be host:port"),
    pool("etcd-without-port", master(highAvailability=etcd("a")), "endpoints[0]", "'a' must be host:port"),
    pool("etcd-twice", master(highAvailability=etcd("a:1", "a:1")), "Duplicate value", schema=True),
    pool("unknown-backend", master(highAvailability={"backend": "KubernetesLease"}), "Unsupported value", '"Etcd"', schema=True),
    pool("no-master", master(replicas=0), "greater than or equal to 1", schema=True),
    pool("six-masters", master(replicas=6, highAvailability=etcd("a:1")), "less than or equal to 5", schema=True),
    # sizes
    pool("no-segment-size", {"distributed": {"mooncake": {"store": {}}}}, "segmentSize: Required value", schema=True),
    pool("zero-segment", mooncake(store={"segmentSize": 0}), "segmentSize", "must be a Kubernetes quantity of at least 1Mi, such as 64Gi"),
    pool("ssd", mooncake(store={**STORE, "ssd": {"capacity": "4Gi"}})),
    pool("ssd-with-a-class", mooncake(store={**STORE, "ssd": {"capacity": 4294967296, "storageClassName": "local-nvme"}})),
    pool("ssd-too-small", mooncake(store={**STORE, "ssd": {"capacity": "4095Mi"}}), "store.ssd.capacity", "at least 4Gi"),
    pool("ssd-too-small-in-bytes", mooncake(store={**STORE, "ssd": {"capacity": 4294967295}}), "store.ssd.capacity", "at least 4Gi"),
    pool("ssd-without-a-size", mooncake(store={**STORE, "ssd": {}}), "capacity: Required value", schema=True),
    *(pool(f"save-{save}", {"local": LOCAL, "save": save}) for save in ("All", "Prompts", 0, 4096)),
    *(pool(f"save-{save}", {"local": LOCAL, "save": save}, "spec.save", "All, Prompts, or the number") for save in ("all", "4096", -1)),
    pool("forgotten-unit", {"local": {"capacity": "64"}}, "capacity", "'64' must be", "at least 1Mi, such as 64Gi"),
    pool("words-as-size", {"local": {"capacity": "lots"}}, "capacity", "a Kubernetes quantity"),
    *(pool(f"huge-{size}", {"local": {"capacity": size}}, f"'{size}' is above 1Pi: check the unit") for size in ("1e30", "2Pi", 2**50 + 1)),
    pool("huge-segment", mooncake(store={"segmentSize": "1Ei"}), "segmentSize", "'1Ei' is above 1Pi"),
    pool("boolean-size", {"local": {"capacity": True}}, "capacity", schema=True),
    # transport
    pool("rdma-without-devices", mooncake(transport={"protocol": "RDMA"}), "transport.devices", "mlx5_0"),
    pool("rdma-empty-devices", mooncake(transport={"protocol": "RDMA", "devices": []}), "transport.devices", "protocol: TCP"),
    pool("tcp-with-devices", mooncake(transport={"devices": ["mlx5_0"]}), "devices is only for RDMA"),
    # external
    pool("external-without-address", {"distributed": {"external": {}}}, "masterAddress: Required value", schema=True),
    *(
        pool(f"external-address-{address}", external(address), "spec.distributed.external.masterAddress", f"'{address}' {HOST_AND_PORT}")
        for address in ("host", "a b:1", "host:port", "host:0", "host:65536", "http://host:1", "host:50051/x", "etcd://a:1;b", ":50051")
    ),
    *(
        pool(f"external-address-{address}", external(address))
        for address in ("10.0.0.7:50051", "[fd00::7]:50051", "m-0.m.ns.svc.cluster.local:65535", "etcd://e-0.example:2379")
    ),
    *(
        pool(f"metadata-{server}", external("m:1", metadataServer=server))
        for server in ("P2PHANDSHAKE", "http://m:8080/metadata", "etcd://e0:2379;e1:2379", "redis://r:6379", "e0:2379,e1:2379")
    ),
    *(
        pool(f"metadata-{server}", external("m:1", metadataServer=server), "metadataServer", "must be P2PHANDSHAKE, or host:port")
        for server in ("p2p", "http://m/metadata", "http://user:secret@m:8080/metadata")
    ),
    # epochs and leases
    pool("negative-epoch", {"local": LOCAL, "resetEpoch": -1}, "resetEpoch", "greater than or equal to 0", schema=True),
    pool("huge-epoch", {"local": LOCAL, "resetEpoch": 2**53}, "resetEpoch", "less than or equal to", schema=True),
    pool("text-epoch", {"local": LOCAL, "resetEpoch": "1"}, "resetEpoch", "must be of type integer", schema=True),
    pool("no-lease", {"local": LOCAL, "reset": {"leaseSeconds": 0}}, "leaseSeconds", "greater than or equal to 1", schema=True),
    # unknown fields, also such that other systems have
    pool("unknown-in-spec", {"local": LOCAL, "resetEpok": 1}, 'unknown field "spec.resetEpok"', schema=True),
    pool("unknown-in-template", master(template={"speck": {}}), "unknown field", "speck", schema=True),
    pool("owned-label", master(template={"metadata": {"labels": {"epochkv.io/pool": "x"}}}), "belong", "prefix of your own"),
    pool("name-too-long", {"local": LOCAL}, "metadata.name must be at most 40 characters", name="p" * 41),
    pool("name-with-dot", {"local": LOCAL}, "metadata.name must be", name="a.b"),
    pool("name-with-digit-first", {"local": LOCAL}, "metadata.name must be", "starting with a letter", name="1a"),
]

CASES = POOL_CASES + ENGINE_CASES
_ETCD = {"replicas": 3, "highAvailability": etcd("a:1")}


def pool_change(id: str, old: Json, new: Json, *says: str) -> Change:
    return Change(id, "KVCachePool", {"local": LOCAL, **old}, {"local": LOCAL, **new}, says or None)


def engine_change(id: str, old: Json, new: Json, *says: str) -> Change:
    model = {"model": {"name": "tiny"}}
    return Change(id, "InferenceEngine", {**model, **old}, {**model, **new}, says or None)


CHANGES = [
    pool_change("raise-lease", {"reset": {"leaseSeconds": 10}}, {"reset": {"leaseSeconds": 20, "reclaimPolicy": "Retain"}}),
    pool_change("lower-lease", {"reset": {"leaseSeconds": 40}}, {"reset": {"leaseSeconds": 39}}, "leaseSeconds never goes down: it is 40"),
    pool_change("drop-long-lease", {"reset": {"leaseSeconds": 40}}, {}, "spec.reset.leaseSeconds never goes down"),
    pool_change(
        "lower-epoch", {"resetEpoch": 7}, {"resetEpoch": 6}, "spec.resetEpoch", "it is 7; to reset, set it above status.targetEpoch"
    ),
    pool_change("largest-step", {"resetEpoch": 7}, {"resetEpoch": 7 + 10**13}),
    *(
        pool_change(f"jump-to-{epoch}", {"resetEpoch": 7}, {"resetEpoch": epoch}, "spec.resetEpoch rises by at most 10000000000000 at a")
        for epoch in (7 + 10**13 + 1, 2**53 - 1)
    ),
    pool_change("remove-epoch", {"resetEpoch": 7}, {}, "spec.resetEpoch", "it is 7"),
    pool_change("rotate-keys", {"keys": {"generation": 1}}, {"keys": {"generation": 2}}),
    pool_change("keys-back", {"keys": {"generation": 2}}, {"keys": {"generation": 1}}, "keys.generation never goes down: it is 2", "set 3"),
    pool_change("add-distributed", {}, {"distributed": MOONCAKE}),
    pool_change("remove-distributed", {"distributed": MOONCAKE}, {}),
    pool_change("change-kind", {"distributed": MOONCAKE}, {"distributed": EXTERNAL}, "change between mooncake and external", "new pool"),
    pool_change("scale-store", mooncake(), mooncake(store={**STORE, "replicas": 3})),
    pool_change("become-available", mooncake(), mooncake(master=_ETCD)),
    pool_change("masters-without-etcd", mooncake(master=_ETCD), mooncake(master={"replicas": 3}), "master.replicas is 3"),
    engine_change("scale-and-change-image", {"replicas": 1, "image": "a"}, {"replicas": 3, "image": "b"}),
    engine_change("move-pool", POOL_REF, {"poolRef": {"name": "other"}}, "spec.poolRef is immutable", "new InferenceEngine"),
    engine_change("add-pool", {}, POOL_REF, "spec.poolRef cannot be added or removed"),
    engine_change("remove-pool", POOL_REF, {}, "spec.poolRef cannot be added or removed"),
    engine_change("sneak-in-arg", {}, {"args": ["--kv-transfer-config={}"]}, *KV),
    engine_change("sneak-in-seed", {}, {"env": [{"name": "PYTHONHASHSEED", "value": "0"}]}, *ENV),
]
