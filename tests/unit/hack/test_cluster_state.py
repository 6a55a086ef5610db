"""Names, addresses and index choice of local clusters."""

from __future__ import annotations

import ipaddress
import json
from pathlib import Path

import pytest

from hack.cluster import state
from hack.cluster.kind import kind_config
from hack.cluster.nodeconfig import cni_conflist, containerd_toml, corefile, dns_objects, kubelet_config
from hack.cluster.provider import ClusterError


def test_addresses_of_the_first_and_a_later_cluster() -> None:
    first, third = state.Network(0), state.Network(2)
    assert (first.range, first.pods, first.services) == ("10.100.0.0/16", "10.100.0.0/17", "10.101.0.0/16")
    assert (first.host, first.node, first.dns, first.kubernetes) == ("10.100.255.1", "10.100.255.2", "10.101.0.10", "10.101.0.1")
    assert (third.range, third.services, third.device) == ("10.104.0.0/16", "10.105.0.0/16", "epochkv2")


def test_no_two_clusters_overlap_and_no_pod_gets_the_nodes_address() -> None:
    networks = [state.Network(index) for index in range(state.MAX_CLUSTERS)]
    ranges = [ipaddress.IPv4Network(cidr) for network in networks for cidr in (network.range, network.services)]
    assert len(set(ranges)) == 2 * state.MAX_CLUSTERS
    assert not any(a.overlaps(b) for number, a in enumerate(ranges) for b in ranges[:number])
    for network in networks:
        pods = ipaddress.IPv4Network(network.pods)
        assert pods.subnet_of(ipaddress.IPv4Network(network.range))
        assert ipaddress.ip_address(network.node) not in pods
        assert len(network.device) <= 15  # the kernel's limit for interface names


@pytest.mark.parametrize("name", ["", "A", "1a", "-a", "a-", "a_b", "a/b", "..", "a" * 16])
def test_bad_names_are_refused(name: str) -> None:
    with pytest.raises(ClusterError, match="lower-case"):
        state.check_name(name)


def test_index_avoids_clusters_and_routes() -> None:
    routes = "default via 192.0.2.1 dev eth0\n10.103.0.0/16 dev vpn0 scope link\n"
    assert state.free_index(set(), "") == 0
    assert state.free_index({0}, routes) == 2  # 1 would use 10.102 and 10.103
    assert state.free_index({0, 2}, routes) == 3
    with pytest.raises(ClusterError, match="taken"):
        state.free_index(set(range(state.MAX_CLUSTERS)), "")


def test_record_survives_and_damage_reads_as_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPOCHKV_RUN", str(tmp_path / "run"))
    monkeypatch.setenv("EPOCHKV_DATA", str(tmp_path / "data"))
    state.save(state.make("one", 7))
    found = state.load("one")
    assert found is not None
    assert found.network.index == 7
    assert found.run == tmp_path / "run" / "one"
    assert found.data == tmp_path / "data" / "one"
    assert state.load("two") is None
    (tmp_path / "run/one/cluster.json").write_text("{half")
    assert state.load("one") is None


def test_socket_path_fits_the_kernels_limit() -> None:
    assert len(str(state.make("a" * 15, 49).containerd_socket)) < 108


def test_configurations_agree_on_addresses_and_sockets() -> None:
    cluster = state.make("one", 1)
    kubelet = kubelet_config(cluster)
    assert kubelet["clusterDNS"] == ["10.103.0.10"]
    assert kubelet["containerRuntimeEndpoint"] == "unix:///run/epochkv/one/containerd.sock"
    assert kubelet["cgroupRoot"] == "/epochkv/one"
    toml = containerd_toml(cluster)
    assert 'address = "/run/epochkv/one/containerd.sock"' in toml
    assert "restrict_oom_score_adj = true" in toml  # without it no sandbox starts where CAP_SYS_RESOURCE is missing
    assert '"subnet": "10.102.0.0/17"' in json.dumps(cni_conflist(cluster))
    assert "bind 10.102.255.2" in corefile(cluster)
    service = dns_objects(cluster)["/api/v1/namespaces/kube-system/services/kube-dns"]
    assert service["spec"]["clusterIP"] == "10.103.0.10"  # type: ignore[index]


def test_kind_mounts_are_read_only_and_absent_when_there_are_none() -> None:
    assert kind_config([])["nodes"] == [{"role": "control-plane"}]
    assert kind_config([Path("/srv/venv")])["nodes"] == [
        {
            "role": "control-plane",
            "extraMounts": [{"hostPath": "/srv/venv", "containerPath": "/srv/venv", "readOnly": True}],
        }
    ]
