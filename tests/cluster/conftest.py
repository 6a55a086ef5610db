"""A real control plane for the tests of this layer: one for the session, ended by pid afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hack.cluster.binaries import build
from hack.cluster.controlplane import ControlPlane


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """etcd + kube-apiserver + kube-controller-manager on loopback. Leave it ready: undo the faults that a test makes."""
    directory: Path = tmp_path_factory.mktemp("cp")
    with ControlPlane(directory, binaries=build()) as plane:
        yield plane


@pytest.fixture
def fresh_control_plane(tmp_path: Path) -> Iterator[ControlPlane]:
    """A control plane of its own for one test, for tests that break it."""
    with ControlPlane(tmp_path / "cp", binaries=build()) as plane:
        yield plane
