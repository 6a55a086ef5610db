"""`EPOCHKV_ATTACH`: engines of a program that has no field for a connector join the pool of the environment; every wrong value is named. An
engine whose pod joined by its label starts, whatever is wrong with it or with its pool: without us, and one line says why.
"""

import copy
import json
import logging
import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig

from epochkv_connector.config import ConnectorConfig
from epochkv_connector.engine import fenced, plugin
from epochkv_fence.connection import ConfigurationError
from epochkv_fence.net.keys import generate_keypair

TIERS = {"local": {"capacity_bytes": 1 << 26}, "distributed": {"master_address": "127.0.0.1:50051"}}
DOCUMENT = {"pool": {"name": "policy", "uid": "u-1"}, "hub": {"endpoint": "tcp://127.0.0.1:7700"}, **TIERS}
TEXT = json.dumps(DOCUMENT)
KEYLESS = json.dumps({**DOCUMENT, "hub": {"endpoint": "tcp://h:7700", "credentials_dir": "/nowhere"}})
HUB, CLIENT = generate_keypair(), generate_keypair()
KEYS = {"EPOCHKV_HUB_PUBLIC_KEY": HUB.public, "EPOCHKV_CLIENT_PUBLIC_KEY": CLIENT.public, "EPOCHKV_CLIENT_SECRET_KEY": CLIENT.secret}
ON = {"EPOCHKV_ATTACH": "1", "EPOCHKV_CONFIG": TEXT, "EPOCHKV_ROOT_SECRET": "5a" * 32, **KEYS}


@pytest.fixture(autouse=True)
def _own_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "share_log_handlers", lambda: None)


def engine(**given: Any) -> Any:
    """Arguments of an engine, as far as attaching looks at them."""
    return SimpleNamespace(**{"kv_transfer_config": None, "kv_offloading_size": None, **given})


def joined(environ: dict[str, str]) -> Any:
    """The `kv_transfer_config` of an engine that had none."""
    arguments = engine()
    plugin.before_engine(arguments, environ)
    return arguments.kv_transfer_config


def test_the_engine_gets_what_the_documentation_has_users_write() -> None:
    transfer = joined(ON)
    assert isinstance(transfer, KVTransferConfig)
    assert (transfer.kv_connector, transfer.kv_connector_module_path) == ("EpochKVConnector", "epochkv_connector.connector")
    assert (transfer.kv_role, transfer.kv_connector_extra_config) == ("kv_both", {})


@pytest.mark.parametrize("value", [None, "", "0", " 0 "])
def test_off_is_off(value: str | None) -> None:
    assert joined({"EPOCHKV_CONFIG": TEXT, **({} if value is None else {"EPOCHKV_ATTACH": value})}) is None


@pytest.mark.parametrize(
    ("given", "num_bytes"),
    [("0", None), ("64Gi", 64 << 30), ("1.5Gi", 3 << 29), ("500M", 5 * 10**8), ("68719476736", 64 << 30), (" 1Ki ", 1024), ("1e9", 10**9)],
)
def test_a_capacity_of_the_environment_wins_over_the_document(given: str, num_bytes: int | None) -> None:
    environ = {**ON, "EPOCHKV_LOCAL_CAPACITY": given}
    extra = joined(environ).kv_connector_extra_config
    assert extra == {"local": num_bytes and {"capacity_bytes": num_bytes}}
    config = ConnectorConfig.parse(extra, environ)
    assert (config.pool.uid, config.local and config.local.capacity_bytes) == ("u-1", num_bytes)
    assert config.distributed is not None, "L2 still comes from the document"


WRONG: list[tuple[dict[str, str], str]] = [
    ({"EPOCHKV_ATTACH": "yes please"}, r"^EPOCHKV_ATTACH is 'yes please'; it must be 1, or 0 for off$"),
    ({"EPOCHKV_CONFIG": ""}, r"^EPOCHKV_ATTACH is 1 and EPOCHKV_CONFIG is not set; set it to the path .*or unset EPOCHKV_ATTACH$"),
    ({"EPOCHKV_CONFIG": "/nowhere/connection.json"}, r"^EPOCHKV_CONFIG: '/nowhere/connection.json' cannot be read \(No such file"),
    ({"EPOCHKV_CONFIG": "{}"}, r"pool is missing"),
    ({"EPOCHKV_CONFIG": json.dumps({**DOCUMENT, "verfy": 1})}, r"^EPOCHKV_CONFIG: verfy is 1, but there is no such key"),
    *(
        ({"EPOCHKV_LOCAL_CAPACITY": size}, r"^EPOCHKV_LOCAL_CAPACITY is '.*'; it must be a size such as 64Gi, or a number of bytes, from")
        for size in ("64GB", "-1Gi", "64", "2Ei", "1e9999999999999999999", "NaN")
    ),
]


@pytest.mark.parametrize(("change", "said"), WRONG)
def test_a_wrong_value_is_named_with_its_remedy(change: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said) as caught:
        joined({**ON, **change})
    assert "\n" not in str(caught.value)


def test_a_switch_that_is_misspelt_is_an_error_also_where_a_connector_is_configured() -> None:
    with pytest.raises(ConfigurationError, match="EPOCHKV_ATTACH is 'on'"):
        plugin.before_engine(engine(kv_transfer_config={"kv_connector": "Other"}), {"EPOCHKV_ATTACH": "on"})


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"kv_transfer_config": {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}}, "kv_transfer_config"),
        ({"kv_transfer_config": KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both")}, "kv_transfer_config"),
        ({"kv_offloading_size": 4.0}, "kv_offloading_size"),
    ],
)
def test_a_connector_that_is_there_stays_and_one_line_says_so(given: dict[str, Any], named: str, caplog: pytest.LogCaptureFixture) -> None:
    arguments = engine(**given)
    before = arguments.kv_transfer_config
    with caplog.at_level(logging.INFO, "epochkv_connector"):
        plugin.before_engine(arguments, ON)
    assert arguments.kv_transfer_config is before
    (line,) = caplog.messages
    assert "EPOCHKV_ATTACH is 1" in line
    assert named in line


def test_arguments_that_are_used_twice_are_joined_once(caplog: pytest.LogCaptureFixture) -> None:
    """vLLM's commands make the configuration of an engine in more than one place."""
    arguments = engine()
    with caplog.at_level(logging.INFO, "epochkv_connector"):
        plugin.before_engine(arguments, ON)
        first = arguments.kv_transfer_config
        plugin.before_engine(arguments, ON)
    assert arguments.kv_transfer_config is first
    assert caplog.messages == ["EpochKV: EPOCHKV_ATTACH joins this engine to pool policy, L1 of 64 MiB and L2 at 127.0.0.1:50051"]


def test_an_engine_without_its_keys_does_not_join(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "epochkv_connector"):
        assert joined({**ON, "EPOCHKV_CONFIG": KEYLESS}) is not None
    [line] = caplog.messages
    assert line.startswith("EpochKV: EPOCHKV_ATTACH: this engine cannot join pool policy, and will serve in bypass: hub.credentials_dir")


# ---------------------------------------------------------------------------------------------- pods that joined by their label
INJECTED = {"EPOCHKV_INJECTED": "1", **ON}
FENCED = {**INJECTED, "EPOCHKV_ATTACH": "0", "EPOCHKV_FENCE": "1"}


class Arguments(SimpleNamespace):
    """`EngineArgs`, as far as we know of it."""

    def create_engine_config(self) -> Any:
        if self.refuses and self.kv_transfer_config is not None:
            raise ValueError("this model has no connector")
        self.calls += 1
        config = copy.copy(self.base)
        config.parallel_config = copy.copy(self.base.parallel_config)
        config.kv_transfer_config = self.kv_transfer_config
        for name, value in self.parallel.items():
            setattr(config.parallel_config, name, value)
        for name, value in self.engine.items():
            setattr(config, name, value)
        return config


@pytest.fixture
def start(base: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Any]:
    log = logging.getLogger("vllm.epochkv")

    def run(environ: dict[str, str], **given: Any) -> tuple[Any, list[str]]:
        for name in ("EPOCHKV_FENCE", "EPOCHKV_ATTACH", "EPOCHKV_INJECTED", "EPOCHKV_LOCAL_CAPACITY"):
            monkeypatch.setenv(name, "")  # and what it was comes back
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        kind = type("EngineArgs", (Arguments,), {"create_engine_config": Arguments.create_engine_config})
        monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", SimpleNamespace(EngineArgs=kind))
        monkeypatch.setattr(fenced, "install", lambda: None)
        monkeypatch.setattr(sys, "argv", ["vllm", "serve"])  # where an error of ours is a SystemExit
        monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
        plugin.register()
        defaults = {"base": base, "kv_transfer_config": None, "kv_offloading_size": None, "refuses": False, "calls": 0}
        arguments = kind(**{**defaults, "parallel": {}, "engine": {}, **given})
        with caplog.at_level(logging.WARNING, log.name):
            configs = [arguments.create_engine_config() for _ in range(2)]  # as vLLM's commands do
        kinds = {getattr(config.kv_transfer_config, "kv_connector", None) for config in configs}
        assert len(kinds) == 1
        return kinds.pop(), sorted(set(caplog.messages))

    log.addHandler(caplog.handler)
    yield run
    log.removeHandler(caplog.handler)


def test_an_engine_that_can_joins(start: Any) -> None:
    assert start(INJECTED) == ("EpochKVConnector", [])
    assert start(FENCED) == (None, [])


@pytest.mark.parametrize(
    ("environ", "given", "why"),
    [
        ({"EPOCHKV_CONFIG": "/nowhere/connection.json"}, {}, "cannot be read"),
        ({"EPOCHKV_CONFIG": KEYLESS}, {}, "hub.credentials_dir is '/nowhere'"),
        ({"EPOCHKV_CONFIG": json.dumps({**DOCUMENT, "later": 1})}, {}, "later is 1, but there is no such key"),
        ({"EPOCHKV_LOCAL_CAPACITY": "2Pi"}, {}, "EPOCHKV_LOCAL_CAPACITY is '2Pi'"),
        ({"EPOCHKV_LOCAL_CAPACITY": "1Pi"}, {}, "lower local.capacity_bytes"),
        ({}, {"engine": {"ec_transfer_config": object()}}, "ec_transfer_config is set"),
        ({}, {"parallel": {"distributed_executor_backend": "external_launcher", "world_size": 2}}, "is external_launcher with 2 ranks"),
        ({}, {"parallel": {"enable_fault_tolerance": True}}, "enable_fault_tolerance is set"),
        (FENCED, {"parallel": {"enable_fault_tolerance": True}}, "enable_fault_tolerance is set"),
        ({}, {"refuses": True}, "this model has no connector"),
        (FENCED, {"engine": {"ec_transfer_config": object()}}, "ec_transfer_config is set"),
        ({**FENCED, "EPOCHKV_CONFIG": KEYLESS}, {}, "hub.credentials_dir is '/nowhere'"),
        ({**FENCED, "EPOCHKV_CONFIG": "/nowhere/connection.json"}, {}, "cannot be read"),
    ],
)
def test_one_that_cannot_starts_as_it_was(start: Any, environ: dict[str, str], given: dict[str, Any], why: str) -> None:
    connector, said = start({**INJECTED, **environ}, **given)
    assert connector is None
    (line,) = said
    assert line.startswith("EpochKV: this engine stays as it is: ")
    assert why in line
    assert (os.environ["EPOCHKV_ATTACH"], os.environ["EPOCHKV_FENCE"]) == ("0", "0"), "nor do its processes do anything"


def test_an_engine_that_was_set_up_by_hand_is_told_by_an_error(start: Any) -> None:
    with pytest.raises(SystemExit, match="EPOCHKV_LOCAL_CAPACITY is '2Pi'"):
        start({**INJECTED, "EPOCHKV_INJECTED": "", "EPOCHKV_LOCAL_CAPACITY": "2Pi"})
