"""`epochkv doctor --config` with a real hub and real agents: well, and with one fault after the other. Nothing hangs."""

import asyncio
import importlib.metadata
import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from epochkv_fence.cli.doctor import CannotLook, Finding, Level, check_plugins, guarded, judge_pool
from epochkv_fence.client import Engine, PoolStatus
from epochkv_fence.net.agent import EngineIdentity
from epochkv_fence.net.keys import generate_keypair
from hack.loopback import free_port
from hack.waiting import eventually
from tests.support.cli import inside
from tests.support.hub import HubWorld, epochkv, hub_world

RUNS = {"epochkv": importlib.metadata.version("epochkv"), "vllm": "0.32.0", "mooncake": "0.3.13.post1"}
HUB_OPTIONS = {"lease_seconds": 2.0}
Doctor = Callable[..., tuple[int, list[dict[str, str]]]]


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str]) -> Doctor:
    """`epochkv doctor --config FOLDER ...`: exit status and findings."""

    def run(folder: Path, *arguments: str) -> tuple[int, list[dict[str, str]]]:
        status, text, errors = inside(capsys, "doctor", "--config", str(folder), "-o", "json", *arguments)
        assert errors == ""
        return status, json.loads(text)["findings"]

    return run


def levels(findings: list[dict[str, str]]) -> dict[str, str]:
    return {one["check"]: one["level"] for one in findings}


def finding(findings: list[dict[str, str]], check: str) -> dict[str, str]:
    (found,) = [one for one in findings if one["check"] == check]
    return found


def test_a_pool_that_is_well(world: HubWorld, doctor: Doctor) -> None:
    for name in ("e0", "e1"):
        world.agents.start(identity=EngineIdentity(name, "", 0, "fp", RUNS))
    pool = world.connect()
    eventually(lambda: [one.state for one in pool.engines()] == ["sharing"] * 2, "all are in use")
    status, findings = doctor(world.folder)
    assert (status, levels(findings)) == (0, {"connection": "ok", "hub": "ok", "engines": "ok"})
    assert "2 engines connected" in finding(findings, "engines")["text"]
    text = epochkv("doctor", "--config", str(world.folder)).stdout
    assert text.splitlines()[-1] == "3 ok"


def test_keys_that_the_hub_refuses(world: HubWorld, tmp_path: Path, doctor: Doctor) -> None:
    wrong = shutil.copytree(world.folder, tmp_path / "wrong")
    pair = generate_keypair()
    (wrong / "client.pub").write_text(pair.public)
    (wrong / "client.key").write_text(pair.secret)
    status, findings = doctor(wrong)
    found = finding(findings, "hub")
    assert (status, found["level"], "STATE/client" in found["fix"]) == (1, "wrong", True)
    assert pair.secret not in json.dumps(findings)


def test_a_hub_that_is_gone_or_hangs_or_is_none(world: HubWorld, tmp_path: Path, doctor: Doctor) -> None:
    folder = shutil.copytree(world.folder, tmp_path / "copy")

    def at(endpoint: str) -> dict[str, str]:
        content = json.loads((folder / "connection.json").read_text())
        content["hub"]["endpoint"] = endpoint
        (folder / "connection.json").write_text(json.dumps(content))
        status, findings = doctor(folder)
        assert status == 1
        return finding(findings, "hub")

    gone = at(f"tcp://127.0.0.1:{free_port()}")
    assert ("nobody listens on 127.0.0.1" in gone["text"], gone["fix"].startswith("epochkv hub --pool NAME")) == (True, True)
    for host in ("no-such-host.invalid", "a..b"):
        assert f"the name {host} cannot be resolved" in at(f"tcp://{host}:7700")["text"]
    with socket.create_server(("127.0.0.1", 0)) as mute:
        assert "or it hangs" in at(f"tcp://127.0.0.1:{mute.getsockname()[1]}")["text"]


def test_a_connection_file_that_cannot_be_used_or_is_open_to_others(world: HubWorld, tmp_path: Path, doctor: Doctor) -> None:
    status, findings = doctor(tmp_path / "nowhere")
    assert (status, levels(findings)) == (1, {"connection": "wrong"})
    trainers = shutil.copytree(world.folder, tmp_path / "trainers")
    (trainers / "root.secret").unlink()
    found = finding(doctor(trainers)[1], "connection")
    assert (found["level"], "root.secret" in found["text"]) == ("warning", True)
    exposed = shutil.copytree(world.folder, tmp_path / "open to others")
    (exposed / "client.key").chmod(0o644)
    found = finding(doctor(exposed)[1], "connection")
    assert (found["level"], found["fix"]) == ("warning", f"chmod go-rwx '{exposed / 'client.key'}'")


def test_the_store_of_a_pool(world: HubWorld, doctor: Doctor) -> None:
    path = world.folder / "connection.json"
    content = json.loads(path.read_text())

    def master(address: str) -> tuple[int, dict[str, str]]:
        path.write_text(json.dumps({**content, "distributed": {"master_address": address}}))
        status, findings = doctor(world.folder)
        return status, finding(findings, "store")

    status, gone = master(f"127.0.0.1:{free_port()}")
    assert (status, gone["level"], "nobody listens" in gone["text"]) == (1, "wrong", True)
    status, inside_of_it = master("policy-master.no-such-namespace.svc:50051")
    assert (status, inside_of_it["level"]) == (2, "unknown"), "a name that only a cluster knows is not wrong"
    with socket.create_server(("127.0.0.1", 0)) as stands_still:  # the kernel accepts
        port = stands_still.getsockname()[1]
        assert master(f"etcd://127.0.0.1:{free_port()};127.0.0.1:{port}")[1]["level"] == "ok"
        assert "does not answer within" in master(f"127.0.0.1:{port}")[1]["text"]
    assert "is no host:port" in master("nowhere")[1]["text"]


# --------------------------------------------------------------------------------------------------- what the hub says of a pool
def engine(name: str = "e0", **fields: Any) -> Engine:
    known: dict[str, Any] = {
        "instance": name.encode().hex(), "name": name, "engine": name, "pod": "", "rank": 0, "epoch": 4, "state": "sharing",
        "old_epoch_requests": 0,
        "age_seconds": 100.0, "silent_seconds": 1.0, "fingerprint": "f", "weights": "a" * 32, "weights_since_s": 500.0, "versions": RUNS,
    }  # fmt: skip
    return Engine(**{**known, **fields})


def pool(*engines: Engine, **fields: Any) -> PoolStatus:
    known: dict[str, Any] = {"name": "policy", "uid": "u", "target": 4, "published": 4, "origin": "Spec", "lease_seconds": 30.0}
    return PoolStatus(**{**known, "engines": engines, "hub_version": "1.0.0", **fields})


BEHIND = {"epoch": 3, "state": "behind"}
OTHER = "b" * 32


@pytest.mark.parametrize(
    ("status", "check", "level", "said"),
    [
        (pool(engine()), "engines", Level.OK, "epoch 4 is published, 1 engines connected"),
        (pool(engine("late", **BEHIND), target=5), "epoch", Level.WARNING, "epoch 5 is asked for and 4 is published: it waits for late"),
        (pool(engine(), target=5), "epoch", Level.WARNING, "waits for leases that are out"),
        (pool(engine("late", **BEHIND)), "engines", Level.WRONG, "late is at epoch 3, and 4 is published"),
        (pool(), "engines", Level.WARNING, "no engine is connected"),
        (pool(settling_seconds=9.0), "engines", Level.WARNING, "the list of engines is complete in 9 s"),
        (pool(engine(state="unknown", weights="", weights_note="it sleeps")), "engines", Level.WARNING, "e0 shares nothing: it sleeps"),
        (pool(engine(state="isolated")), "engines", Level.WARNING, "e0 shares nothing: its names of this epoch are given up; it has"),
        (pool(engine(state="asleep", weights="")), "engines", Level.OK, "none that is awake stalls"),
        (pool(engine(silent_seconds=25.0)), "engines", Level.WARNING, "was last heard 25 s ago, and has a lease of 30 s"),
        (pool(engine(tiers_off="L1Only", tiers_note="a random seed")), "tiers", Level.WARNING, "e0: L1Only: a random seed"),
        (pool(engine(), engine("e1", weights=OTHER)), "weights", Level.WARNING, "bbbbbbbb: e1"),
        (pool(engine(), engine("e1", weights=OTHER, fingerprint="g")), "engines", Level.OK, "2 engines connected"),
        (pool(engine(), engine("e1", versions={"mooncake": "0.3.12"})), "versions", Level.WRONG, "0.3.12, 0.3.13"),
    ],
)
def test_what_the_hub_says_of_a_pool(status: PoolStatus, check: str, level: Level, said: str) -> None:
    (found,) = judge_pool(status)
    assert (found.check, found.level, said in found.text) == (check, level, True), found


# ------------------------------------------------------------------------------------------------------------- how checks are run
def test_one_check_that_hangs_or_breaks_costs_no_other() -> None:
    async def hangs() -> list[Finding]:
        await asyncio.sleep(3600)
        return []

    async def breaks() -> list[Finding]:
        raise KeyError("surprise")

    async def forbidden() -> list[Finding]:
        raise CannotLook("may not look", "ask for it")

    async def run() -> list[Finding]:
        return [one for work in (hangs(), breaks(), forbidden()) for one in await guarded("x", work, seconds=0.05)]

    found = asyncio.run(run())
    assert [one.level for one in found] == [Level.UNKNOWN] * 3
    assert ("no answer" in found[0].text, "KeyError" in found[1].text, found[2].fix) == (True, True, "ask for it")


@pytest.mark.parametrize(
    ("environ", "there", "said", "fix"),
    [
        ({"EPOCHKV_ATTACH": "1"}, ["epochkv"], "", ""),
        ({"EPOCHKV_ATTACH": "1"}, ["other"], "the connector is not installed here", "pip install"),
        ({"EPOCHKV_ATTACH": "yes"}, ["epochkv"], "EPOCHKV_ATTACH is 'yes'; it must be 1", "export EPOCHKV_ATTACH=1"),
        ({"EPOCHKV_ATTACH": "1", "VLLM_PLUGINS": "a,b"}, ["epochkv"], "VLLM_PLUGINS is 'a,b', so vLLM does not", "PLUGINS=a,b,epochkv"),
        ({"VLLM_PLUGINS": ""}, ["epochkv"], "engines share nothing", "export VLLM_PLUGINS=epochkv"),
        ({"VLLM_PLUGINS": "x, epochkv"}, [], "vLLM does not load epochkv", "export VLLM_PLUGINS=x,epochkv"),
        ({"VLLM_PLUGINS": "EpochKV"}, [], "vLLM does not load epochkv", "export VLLM_PLUGINS=epochkv"),
        ({"EPOCHKV_LOCAL_CAPACITY": "abc"}, ["epochkv"], "EPOCHKV_LOCAL_CAPACITY is 'abc'; it must be a size", "=64Gi"),
        ({"VERL_USE_EXTERNAL_PLUGINS": "x, EpochKV"}, [], "", ""),
        ({"VERL_USE_EXTERNAL_PLUGINS": "x"}, [], "refuses the block kv_store", "export VERL_USE_EXTERNAL_PLUGINS=x,epochkv"),
    ],
)
def test_plugins_that_the_environment_leaves_out(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], there: list[str], said: str, fix: str
) -> None:
    monkeypatch.setattr("epochkv_fence.cli.doctor.entry_points", lambda group: SimpleNamespace(names=there))
    found = check_plugins(environ)
    assert [(one.check, one.level) for one in found] == ([("plugins", Level.WRONG)] if said else [])
    assert all(said in one.text and fix in one.fix for one in found)


def test_without_the_operators_package_a_cluster_is_named_as_what_is_missing(tmp_path: Path) -> None:
    hidden = tmp_path / "kubernetes"
    hidden.mkdir()
    (hidden / "__init__.py").write_text("raise ModuleNotFoundError('gone', name='kubernetes')\n")
    done = epochkv("doctor", "-n", "rl", PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert "install epochkv[operator]" in done.stderr
    with hub_world(tmp_path / "state", **HUB_OPTIONS) as world:
        assert epochkv("doctor", "--config", str(world.folder), PYTHONPATH=str(tmp_path)).returncode == 0
