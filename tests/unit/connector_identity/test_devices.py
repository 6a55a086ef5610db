"""RDMA is refused where the kernel knows no device for it, or not the one that was named."""

from __future__ import annotations

from pathlib import Path

import pytest

from epochkv_connector.config import DEVICES, ConfigError, ConnectorConfig, check_devices


def config(protocol: str = "rdma", device_name: str = "") -> ConnectorConfig:
    store = {"master_address": "h:1", "protocol": protocol, "device_name": device_name}
    return ConnectorConfig.parse({"pool": {"name": "p", "uid": "u"}, "distributed": store}, {})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("mlx5_0", "mlx5_1"):
        (tmp_path / DEVICES / name).mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize("device_name", ["", "mlx5_0", "mlx5_0, mlx5_1"])
def test_a_machine_with_the_devices_has_rdma(root: Path, device_name: str) -> None:
    check_devices(config(device_name=device_name), root)


def test_tcp_needs_none(tmp_path: Path) -> None:
    check_devices(config("tcp"), tmp_path)
    check_devices(ConnectorConfig.parse({"pool": {"name": "p", "uid": "u"}}, {}), tmp_path)


@pytest.mark.parametrize("made", [True, False])
def test_a_machine_without_a_device_is_told_to_use_tcp(tmp_path: Path, made: bool) -> None:
    if made:
        (tmp_path / DEVICES).mkdir(parents=True)
    with pytest.raises(ConfigError, match=r'distributed\.protocol is "rdma"; it must be "tcp" on this machine'):
        check_devices(config(), tmp_path)


def test_a_device_of_another_machine_is_named_with_those_of_this_one(root: Path) -> None:
    with pytest.raises(ConfigError, match=r"device_name is 'mlx5_0,roce9'; this machine has no roce9; it must be of: mlx5_0, mlx5_1"):
        check_devices(config(device_name="mlx5_0,roce9"), root)
