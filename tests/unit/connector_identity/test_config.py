"""Every wrong configuration is an error that names the key; keys that cannot be read are not one (the engine serves without a hub)."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epochkv_connector.config import ConnectorConfig, check_fits, memory_limit
from epochkv_fence.connection import ConfigurationError

POOL = {"pool": {"name": "policy", "namespace": "default", "uid": "u-1"}}


WRONG: list[tuple[dict[str, Any], str, str]] = [
    # what is given, the key and the value in the message, what is wrong
    ({"verify": "half"}, "verify is 'half'", "Invalid enum value"),
    ({"local": {}}, "local.capacity_bytes is missing", ""),
    ({"local": {"capacity_bytes": 0}}, "local.capacity_bytes is 0", "`int` >= 512"),
    ({"local": {"capacity_bytes": 10**40}}, "local.capacity_bytes is 1" + 40 * "0", "<= 1125899906842624"),
    ({"distributed": {"master_address": "host:0"}}, "distributed.master_address is 'host:0'", "matching regex"),
    ({"distributed": {"master_address": "etcd://a:1;b"}}, "distributed.master_address is 'etcd://a:1;b'", "matching regex"),
    ({"distributed": {"master_address": "h:1", "metadata_server": ""}}, "distributed.metadata_server is ''", "matching regex"),
    ({"allow_untested_vllm": 1}, "allow_untested_vllm is 1", "Expected `bool`"),
    ({"lookup_wait_ms": math.nan}, "lookup_wait_ms is NaN", "`float` >= 0.0"),
    ({"lookup_deadline_ms": math.inf}, "lookup_deadline_ms is Infinity", "<= 600000.0"),
    ({"hub": {"endpoint": "http://hub:7700"}}, "hub.endpoint is 'http://hub:7700'", "like tcp://host:7700"),
    ({"verify": {"a": [1] * 1000}}, 'verify is {"a": [1, 1', "Expected `str`"),
    ({"config_file": 3}, "config_file is a int", "give a path"),
    ({"local": {"capacityBytes": 1}}, "local.capacityBytes is 1", "there is no such key"),
    ({"new\nline": 1}, "new\\nline is 1", "there is no such key"),
]


@pytest.mark.parametrize(("extra", "named", "wrong"), WRONG)
def test_a_wrong_value_is_one_line_with_key_value_and_what_is_wrong(extra: dict[str, Any], named: str, wrong: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        ConnectorConfig.parse({**POOL, **extra}, {})
    words = str(caught.value)
    assert words.startswith(f"kv_connector_extra_config: {named}")
    assert wrong in words
    assert "\n" not in words
    assert len(words) < 500


@pytest.mark.parametrize(
    "address", ["h:1", "mooncake.ns.svc:50051", "10.0.0.1:65535", "[::1]:50051", "etcd://a:2379", "etcd://a:2379;[fe80::1]:2379"]
)
def test_addresses_of_masters_are_taken(address: str) -> None:
    config = ConnectorConfig.parse({**POOL, "distributed": {"master_address": address, "protocol": "rdma", "device_name": "mlx5_0"}}, {})
    assert config.distributed is not None
    assert config.distributed.master_address == address


LEAF = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
KEY = st.sampled_from(["uid", "endpoint", "capacity_bytes", "y"])
ANYTHING = st.recursive(LEAF, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEY, inner, max_size=3), max_leaves=5)


@given(st.dictionaries(st.sampled_from([*ConnectorConfig.__struct_fields__, "x"]), ANYTHING, max_size=5))
@settings(max_examples=100, deadline=None)
def test_whatever_comes_in_only_a_sentence_comes_out(extra: dict[str, Any]) -> None:
    said, config = "one sentence", None
    try:
        config = ConnectorConfig.parse({**POOL, **extra}, {})
    except ConfigurationError as error:
        said = str(error)
    assert len(said.splitlines()) == 1
    assert config is None or (config.lookup_deadline_ms > 0 and config.staging_slots >= 1)


def test_a_file_gives_what_is_not_given_inline(tmp_path: Path) -> None:
    path = tmp_path / "epochkv.json"
    path.write_text(json.dumps({**POOL, "verify": "header", "allow_untested_vllm": True}))
    config = ConnectorConfig.parse({"allow_untested_vllm": False}, {"EPOCHKV_CONFIG": str(path)})
    assert (config.verify, config.allow_untested_vllm) == ("header", False)
    assert ConnectorConfig.parse({"config_file": str(path)}, {}).allow_untested_vllm is True


def test_a_wrong_value_in_a_file_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "epochkv.json"
    path.write_text(json.dumps({**POOL, "verify": "some", "allow_untested_vllm": False}))
    with pytest.raises(ConfigurationError, match=rf"{path}: verify is 'some'"):
        ConnectorConfig.parse({"config_file": str(path)}, {})
    with pytest.raises(ConfigurationError, match=r"kv_connector_extra_config: verify is 'none'"):
        ConnectorConfig.parse({"config_file": str(path), "verify": "none"}, {})
    path.write_text(json.dumps({"pool": {"name": "policy", "uid": ""}}))
    with pytest.raises(ConfigurationError, match=rf"{path}: pool.uid is empty"):
        ConnectorConfig.parse({"config_file": str(path)}, {})


GIB = 1 << 30


def write(root: Path, path: str, content: str) -> None:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(content)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path, "proc/meminfo", f"MemTotal:       {64 * GIB // 1024} kB\nMemFree: 5 kB\n")
    return tmp_path


V1, MACHINE = "memory/memory.limit_in_bytes", (64 * GIB, "the machine's memory")


@pytest.mark.parametrize(
    ("file", "content", "limit"),
    [
        ("memory.max", f"{8 * GIB}\n", (8 * GIB, "memory.max of its cgroup")),
        ("memory.max", "max\n", MACHINE),
        ("memory.max", "-5 apples", MACHINE),
        (V1, f"{4 * GIB}\n", (4 * GIB, "memory.limit_in_bytes of its cgroup")),
        (V1, "9223372036854771712", MACHINE),
    ],
)
def test_a_container_sees_its_own_group_as_the_root(root: Path, file: str, content: str, limit: tuple[int, str]) -> None:
    write(root, f"sys/fs/cgroup/{file}", content)
    assert memory_limit(root) == limit


def test_nothing_is_no_limit(tmp_path: Path) -> None:
    assert memory_limit(tmp_path) is None
    check_fits(1 << 60, "local.capacity_bytes", 1 << 60, tmp_path)


def test_what_cannot_exist_is_an_error_with_both_numbers(root: Path) -> None:
    write(root, "sys/fs/cgroup/memory.max", str(8 * GIB))
    check_fits(8 * GIB, "local.capacity_bytes", 8 * GIB, root)
    with pytest.raises(ConfigurationError) as caught:
        check_fits(9 * GIB, "local.capacity_bytes", 18 * GIB, root)
    assert str(caught.value) == (
        f"kv_connector_extra_config: local.capacity_bytes is {18 * GIB}, which takes {9 * GIB} bytes (9.0 GiB) on this machine; "
        f"it must stay below {8 * GIB} bytes (8.0 GiB, memory.max of its cgroup) with room for vLLM; "
        "lower local.capacity_bytes, or raise that limit"
    )
