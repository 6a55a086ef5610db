"""`helm test` in a pod of a real kubelet: admitted, allowed to do what it does, and let through to the hub."""

import pytest

from hack.demo.kube import Kube
from hack.demo.setup import SYSTEM, Setup
from hack.waiting import eventually

pytestmark = pytest.mark.timeout(1500)  # the first test waits for the cluster, too


def test_helm_test(setup: Setup, kube: Kube) -> None:
    assert "epoch 1 published" in setup.helm("test", "epochkv", "--logs")
    pools = f"/apis/epochkv.io/v1alpha1/namespaces/{SYSTEM}/kvcachepools"
    eventually(lambda: kube.get(pools)["items"] == [], "the test's pool is gone")
    kube.kubectl("-n", SYSTEM, "delete", "pod", "-l", "app.kubernetes.io/component=test")
