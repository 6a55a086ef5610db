"""verl's `kv_store` block: what it stands for, every wrong field by name, and real hubs and masters that answer or do not."""

import asyncio
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from epochkv_connector.verl.kv_store import BlockError, StoreUnreachable, expand, find_problem, parse, resolve
from hack.loopback import free_port
from hack.standalone.mooncake import Mooncake
from tests.support.hub import HubWorld, altered, hub_world

VLLM: dict[str, Any] = {"name": "vllm"}
PLACE = {"kv_connector": "EpochKVConnector", "kv_connector_module_path": "epochkv_connector.connector"}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubWorld]:
    with hub_world(tmp_path_factory.mktemp("pool") / "state") as world:
        yield world


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with Mooncake(tmp_path_factory.mktemp("mooncake"), num_stores=0) as mooncake:
        yield mooncake.address


def block(**keys: Any) -> dict[str, Any]:
    return {"enable": True, **keys}


# ------------------------------------------------------------------ fields
WRONG: list[tuple[Any, str]] = [
    ({"on_failure": "explode"}, r"rollout\.kv_store: on_failure is 'explode': Invalid enum value"),
    ({"enabled": True}, r"enabled is true, but there is no such key"),
    ({"enable": "yes"}, r"enable is 'yes': Expected `bool`"),
    ({"kv_connector": "LMCacheConnector"}, r"kv_connector is 'LMCacheConnector'"),
    ({"config_path": 7}, r"config_path is 7: Expected `str"),
    ({"extra_config": "x"}, r"extra_config is 'x': Expected `object`"),
    ("on", r"rollout\.kv_store: Expected `object`, got `str`; docs/trainers/verl\.md says"),
]


@pytest.mark.parametrize(("given", "said"), WRONG)
def test_a_wrong_field_is_named_with_what_is_allowed(given: Any, said: str) -> None:
    """Also in a block that is off: it would be wrong the day it is switched on."""
    with pytest.raises(BlockError, match=said) as caught:
        resolve(given, VLLM, {})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("rollout", "said"),
    [
        ({"name": "sglang"}, r"rollout\.name is 'sglang'; it must be vllm"),
        ({"name": "vllm", "engine_kwargs": {"vllm": {"kv_transfer_config": "{}"}}}, "has a kv_transfer_config, too; remove one of them"),
        ({"name": "vllm", "disaggregation": {"enabled": True}}, r"rollout\.disaggregation\.enabled, too"),
    ],
)
def test_what_verl_would_ignore_or_overwrite_is_refused(rollout: dict[str, Any], said: str) -> None:
    with pytest.raises(BlockError, match=said):
        resolve(block(config_path="/nowhere"), rollout, {})


# ------------------------------------------------------------------ files
def test_the_pools_file_stands_for_our_connector(world: HubWorld) -> None:
    path = str(world.folder / "connection.json")
    expected = {**PLACE, "kv_role": "kv_both", "kv_connector_extra_config": {"config_file": path}}
    for given in (block(config_path=path), block(config_path=path, kv_connector="EpochKVConnector")):
        assert resolve(given, VLLM, {}) == expected
    assert resolve(block(), VLLM, {"EPOCHKV_CONFIG": path}) == expected
    more = {"local": {"capacity_bytes": 1 << 30}, "verify": "header"}
    found = resolve(block(config_path=path, extra_config=more, kv_role="kv_producer"), VLLM, {})
    assert found == {**PLACE, "kv_role": "kv_producer", "kv_connector_extra_config": {"config_file": path, **more}}


def test_a_document_in_the_drivers_environment_reaches_the_engines(world: HubWorld) -> None:
    content = json.loads((world.folder / "connection.json").read_text())
    content["hub"]["credentials_dir"] = str(world.folder)
    found = resolve(block(), VLLM, {"EPOCHKV_CONFIG": json.dumps(content)})
    assert found is not None
    assert found["kv_connector_extra_config"] == content


def test_a_path_is_absolute_for_workers_that_run_elsewhere(world: HubWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(world.folder.parent)
    found = expand(parse(block(config_path="client/connection.json")), {})
    assert found.transfer["kv_connector_extra_config"] == {"config_file": str(world.folder / "connection.json")}


@pytest.mark.parametrize("policy", ["fallback", "crash"])
def test_a_file_that_cannot_be_meant_is_refused_whatever_on_failure_says(world: HubWorld, tmp_path: Path, policy: str) -> None:
    (tmp_path / "other").write_text('{"model": 1}')
    ours = str(world.folder / "connection.json")
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "config_path is missing; it must be the path of a connection.json, or set EPOCHKV_CONFIG"),
        ({"config_path": str(tmp_path / "absent")}, "config_path: '.*absent' cannot be read .No such file"),
        ({"config_path": str(tmp_path / "other")}, "model is 1, but there is no such key"),
        ({"config_path": ours, "extra_config": {"verfy": 1}}, r"kv_store: extra_config: verfy is 1, but there is no such key"),
    ]
    for given, said in cases:
        with pytest.raises(BlockError, match=said):
            resolve(block(on_failure=policy, **given), VLLM, {})


def test_a_file_without_its_keys_is_refused(world: HubWorld, tmp_path: Path) -> None:
    path = altered(world.folder, tmp_path / "client")
    (tmp_path / "client/client.key").unlink()
    with pytest.raises(BlockError, match=r"hub\.credentials_dir is .*client\.key"):
        resolve(block(config_path=path), VLLM, {})


# ------------------------------------------------------------------ at launch
def test_another_pool_than_the_hubs_is_refused(world: HubWorld, tmp_path: Path) -> None:
    path = altered(world.folder, tmp_path / "client", pool={"uid": "somebody-else"})
    with pytest.raises(BlockError, match=r"config_path names another pool than its hub serves: .*somebody-else"):
        resolve(block(config_path=path, on_failure="fallback"), VLLM, {})
    with pytest.raises(BlockError, match=r"EPOCHKV_CONFIG names another pool than its hub serves: .*somebody-else"):
        resolve(block(), VLLM, {"EPOCHKV_CONFIG": str(path)})
    own = {"pool": {"name": "policy", "uid": "somebody-else"}}
    with pytest.raises(BlockError, match=r"extra_config names another pool than its hub serves: .*somebody-else"):
        resolve(block(config_path=path, extra_config=own), VLLM, {})


def test_what_does_not_answer(world: HubWorld, master: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nobody, here = free_port(), {"distributed": {"master_address": master}}
    gone = altered(world.folder, tmp_path / "hub", hub={"endpoint": f"tcp://127.0.0.1:{nobody}"})
    lost = altered(world.folder, tmp_path / "master", distributed={"master_address": f"127.0.0.1:{nobody}"})
    for given, said in (
        ({"config_path": gone}, f"the hub tcp://127.0.0.1:{nobody} cannot be used: nobody listens"),
        ({"config_path": lost}, f"the Mooncake master 127.0.0.1:{nobody} cannot be used: nobody listens"),
    ):
        with pytest.raises(StoreUnreachable, match=f"{said}.*; on_failure is crash; start it, or"):
            resolve(block(on_failure="crash", **given), VLLM, {})
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert resolve(block(**given), VLLM, {}) is None
        (line,) = caplog.messages
        assert said in line
        assert "rollout engines run without the connector" in line
    hub = {"endpoint": world.options.listen, "credentials_dir": str(world.folder)}
    found = resolve(block(config_path=gone, on_failure="crash", extra_config={"hub": hub, **here}), VLLM, {})
    assert found is not None, "what extra_config names is what is looked at"


def test_a_look_inside_a_running_event_loop(world: HubWorld) -> None:
    """Ray's asynchronous actors have one."""

    async def look() -> Any:
        return resolve(block(config_path=str(world.folder)), VLLM, {})

    assert asyncio.run(look()) is not None
    assert asyncio.run(find_problem(expand(parse(block(config_path=str(world.folder))), {}))) is None


def test_the_driver_imports_neither_vllm_nor_torch() -> None:
    code = "import sys, epochkv_connector.verl.kv_store; print([name for name in ('vllm', 'torch', 'mooncake') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
