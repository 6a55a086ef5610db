"""An engine whose pod joined by its label starts, whatever is wrong with it or with its pool: without us, and one line says why."""

import copy
import json
import logging
import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from epochkv_connector.engine import fenced, plugin
from tests.unit.connector_identity.test_attach import DOCUMENT, ON

INJECTED = {"EPOCHKV_INJECTED": "1", **ON}
FENCED = {**INJECTED, "EPOCHKV_ATTACH": "0", "EPOCHKV_FENCE": "1"}
KEYLESS = json.dumps({**DOCUMENT, "hub": {"endpoint": "tcp://h:7700", "credentials_dir": "/nowhere"}})


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
        monkeypatch.setattr(plugin, "share_log_handlers", lambda: None)
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
