"""Every wrong configuration is an error that names the key; the hub's address is not one (the engine serves without a hub)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from epochkv_connector.config import ConfigError, ConnectorConfig

POOL = {"pool": {"name": "policy", "namespace": "default", "uid": "u-1"}}


def test_the_smallest_configuration_has_no_tier_and_no_hub() -> None:
    config = ConnectorConfig.parse(POOL, {})
    assert (config.hub, config.local, config.distributed) == (None, None, None)
    assert (config.weights_source, config.on_local_reset, config.encoder) == ("Pushed", "private", "Pushed")


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"capacity": 1}, "capacity"),
        ({"weights_source": "Trained"}, "weights_source"),
        ({"local": {"capacity_bytes": 0}}, "local.capacity_bytes is 0"),
        ({"local": {"capacity_bytes": "much"}}, "capacity_bytes"),
        ({"distributed": {"master_address": "host"}}, "distributed.master_address is 'host'"),
        ({"tracker": True, "distributed": {"master_address": "h:1"}}, "tracker is true"),
        ({"lookup_deadline_ms": 0}, "lookup_deadline_ms is 0"),
        ({"min_load_tokens": -1}, "min_load_tokens is -1"),
        ({"pool": {"name": "p", "namespace": "d", "uid": ""}}, "pool.uid is empty"),
        ({"pool": {"name": "p"}}, "uid"),
    ],
)
def test_a_wrong_value_is_named(extra: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ConnectorConfig.parse({**POOL, **extra}, {})


def test_an_address_that_is_none_is_left_to_the_link() -> None:
    hub = {"endpoint": "http://hub", "credentials_dir": "/nowhere"}
    assert ConnectorConfig.parse({**POOL, "hub": hub}, {}).hub is not None


def test_a_file_gives_what_is_not_given_inline(tmp_path: Path) -> None:
    path = tmp_path / "epochkv.json"
    path.write_text(json.dumps({**POOL, "weights_source": "Model", "tracker": True}))
    config = ConnectorConfig.parse({"tracker": False}, {"EPOCHKV_CONFIG": str(path)})
    assert (config.weights_source, config.tracker) == ("Model", False)
    assert ConnectorConfig.parse({"config_file": str(path)}, {}).tracker is True


def test_the_environment_alone_may_hold_it_and_folders_are_relative_to_the_file(tmp_path: Path) -> None:
    inline = {"EPOCHKV_CONFIG": json.dumps({**POOL, "hub": {"endpoint": "tcp://hub:7700"}})}
    config = ConnectorConfig.parse({}, inline)
    assert config.hub is not None
    assert config.hub.credentials_dir is None
    path = tmp_path / "connection.json"
    path.write_text(json.dumps({**POOL, "hub": {"endpoint": "tcp://hub:7700", "credentials_dir": "keys"}}))
    config = ConnectorConfig.parse({}, {"EPOCHKV_CONFIG": str(tmp_path)})
    assert config.hub is not None
    assert config.hub.credentials_dir == str(tmp_path / "keys")


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.json"):
        ConnectorConfig.parse({"config_file": str(tmp_path / "absent.json")}, {})
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ConfigError, match=r"broken\.json"):
        ConnectorConfig.parse({"config_file": str(tmp_path / "broken.json")}, {})
