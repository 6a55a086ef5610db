"""Addresses and index choice of local clusters."""

import ipaddress

import pytest

from hack.cluster import config
from hack.cluster.provider import ClusterError


def test_no_two_clusters_overlap_and_no_pod_gets_the_nodes_address() -> None:
    networks = [config.Network(index) for index in range(config.MAX_CLUSTERS)]
    ranges = [ipaddress.IPv4Network(cidr) for network in networks for cidr in (network.range, network.services)]
    assert len(set(ranges)) == 2 * config.MAX_CLUSTERS
    assert not any(a.overlaps(b) for number, a in enumerate(ranges) for b in ranges[:number])
    for network in networks:
        pods = ipaddress.IPv4Network(network.pods)
        assert pods.subnet_of(ipaddress.IPv4Network(network.range))
        assert ipaddress.ip_address(network.node) not in pods
        assert len(network.device) <= 15  # the kernel's limit for interface names


def test_index_avoids_clusters_and_routes() -> None:
    routes = "default via 192.0.2.1 dev eth0\n10.103.0.0/16 dev vpn0 scope link\n"
    assert config.free_index(set(), "") == 0
    assert config.free_index({0}, routes) == 2  # 1 would use 10.102 and 10.103
    assert config.free_index({0, 2}, routes) == 3
    with pytest.raises(ClusterError, match="taken"):
        config.free_index(set(range(config.MAX_CLUSTERS)), "")
