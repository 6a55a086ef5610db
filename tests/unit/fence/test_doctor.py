"""`epochkv doctor --config` with a real hub and real agents: well, and with one fault after the other. Nothing hangs."""

from __future__ import annotations

import asyncio
import http.server
import importlib.metadata
import json
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from epochkv_fence.client import Pool
from epochkv_fence.doctor.finding import CannotLook, Finding, Level
from epochkv_fence.doctor.running import Check, Examination, Shared, apart, run_checks
from epochkv_fence.doctor.store import look_at_master
from epochkv_fence.net import EngineIdentity, generate_keypair
from hack.loopback import free_port
from hack.waiting import eventually
from tests.support.cli import inside
from tests.support.fence import FakeEngine
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


def join(world: HubWorld, name: str, engine: FakeEngine | None = None, versions: dict[str, str] | None = None) -> FakeEngine:
    _, made = world.agents.start(engine=engine, identity=EngineIdentity(name, "", 0, "fp", RUNS if versions is None else versions))
    return made


def known(world: HubWorld, number: int) -> Pool:
    pool = world.connect()
    eventually(lambda: [one.state for one in pool.engines()] == ["use"] * number, "all are in use")
    return pool


def test_a_pool_that_is_well(world: HubWorld, doctor: Doctor) -> None:
    for name in ("e0", "e1"):
        join(world, name)
    known(world, 2)
    status, findings = doctor(world.folder)
    assert (status, set(levels(findings).values())) == (0, {"ok"})
    assert list(levels(findings)) == ["connection", "hub", "epoch", "engines", "weights", "tiers", "versions", "clocks"]
    assert "2 engines connected, 2 in use" in finding(findings, "engines")["text"]
    assert "vLLM 0.32.0, Mooncake 0.3.13.post1" in finding(findings, "versions")["text"]
    text = epochkv("doctor", "--config", str(world.folder)).stdout
    assert text.splitlines()[-1] == "8 ok"


def test_the_versions_of_an_engine_and_of_its_hub_reach_a_client(world: HubWorld) -> None:
    long = {f"package-{number}": "1\n" + "0" * 100 for number in range(9)}
    for name, versions in (("known", RUNS), ("long", long), ("older", {})):
        join(world, name, versions=versions)
    status = known(world, 3).status()
    found = {engine.name: engine.versions for engine in status.engines}
    assert (found["known"], found["older"]) == (RUNS, {})
    assert found["long"] == {f"package-{number}": "1 " + "0" * 62 for number in range(8)}, "cut to what a message can carry"
    assert status.hub_version == RUNS["epochkv"]


def test_an_engine_that_stalls_and_lacks_tiers(world: HubWorld, doctor: Doctor) -> None:
    stalls, limited = FakeEngine(), FakeEngine()
    limited.lacks = ("SavesOnly", "loads are off: set kv_load_failure_policy to recompute")
    join(world, "stalls", stalls)
    join(world, "limited", limited)
    pool = known(world, 2)
    stalls.is_busy = True
    pool.reset(timeout_s=30)
    assert [one.name for one in pool.engines() if one.state == "behind"] == ["stalls"], "it is there, and does not move"
    status, findings = doctor(world.folder)
    stalls.is_busy = False
    found = finding(findings, "engines")
    assert (status, found["level"], "engine stalls is at epoch 0" in found["text"]) == (1, "wrong", True)
    assert (levels(findings)["epoch"], levels(findings)["tiers"]) == ("ok", "warning")
    assert "limited: SavesOnly: loads are off" in finding(findings, "tiers")["text"]


def test_keys_that_the_hub_refuses(world: HubWorld, tmp_path: Path, doctor: Doctor) -> None:
    wrong = shutil.copytree(world.folder, tmp_path / "wrong")
    pair = generate_keypair()
    (wrong / "client.pub").write_text(pair.public)
    (wrong / "client.key").write_text(pair.secret)
    status, findings = doctor(wrong)
    found = finding(findings, "hub")
    assert (status, found["level"], "refuses our key" in found["text"], "STATE/client" in found["fix"]) == (1, "wrong", True, True)
    assert {levels(findings)[check] for check in ("epoch", "engines", "weights", "tiers", "versions", "clocks")} == {"unknown"}
    assert pair.secret not in json.dumps(findings)
    (wrong / "hub.pub").write_text(generate_keypair().public)
    assert "hub.pub is not the key of that hub" in finding(doctor(wrong)[1], "hub")["text"]


def test_a_key_of_another_pool(world: HubWorld, tmp_path: Path, doctor: Doctor) -> None:
    other = shutil.copytree(world.folder, tmp_path / "other")
    content = json.loads((other / "connection.json").read_text())
    content["pool"]["uid"] = "somebody-else"
    (other / "connection.json").write_text(json.dumps(content))
    found = finding(doctor(other)[1], "hub")
    assert (found["level"], "somebody-else" in found["text"]) == ("wrong", True)


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
    assert "cannot be resolved" in at("tcp://no-such-host.invalid:7700")["text"]
    with socket.create_server(("127.0.0.1", 0)) as mute:
        assert "or it hangs" in at(f"tcp://127.0.0.1:{mute.getsockname()[1]}")["text"]


def test_a_connection_file_that_cannot_be_used_or_is_open_to_others(world: HubWorld, tmp_path: Path, doctor: Doctor) -> None:
    status, findings = doctor(tmp_path / "nowhere")
    assert (status, finding(findings, "connection")["level"], levels(findings)["hub"]) == (1, "wrong", "unknown")
    trainers = shutil.copytree(world.folder, tmp_path / "trainers")
    (trainers / "root.secret").unlink()
    found = finding(doctor(trainers)[1], "connection")
    assert (found["level"], "root.secret" in found["text"]) == ("warning", True)
    exposed = shutil.copytree(world.folder, tmp_path / "exposed")
    (exposed / "client.key").chmod(0o644)
    found = finding(doctor(exposed)[1], "connection")
    assert (found["level"], found["fix"]) == ("warning", f"chmod go-rwx {exposed / 'client.key'}")


@contextmanager
def admin_port(health: int, metrics: str) -> Iterator[str]:
    """What the admin port of a Mooncake master answers."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = metrics.encode() if self.path == "/metrics" else b"service plane is not active"
            self.send_response(200 if self.path == "/metrics" else health)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Not of interest."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_a_store_whose_name_only_a_cluster_knows_is_not_called_wrong() -> None:
    [inside_of_it] = asyncio.run(look_at_master("policy-master.no-such-namespace.svc:50051"))
    assert inside_of_it.level is Level.UNKNOWN
    assert "an address inside of a cluster" in inside_of_it.text
    [elsewhere] = asyncio.run(look_at_master("no-such-host.invalid:50051"))
    assert elsewhere.level is Level.WRONG


def test_the_store_of_a_pool(world: HubWorld, doctor: Doctor) -> None:
    path = world.folder / "connection.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "distributed": {"master_address": f"127.0.0.1:{free_port()}"}}))
    room = "master_allocated_bytes 1073741824\nmaster_total_capacity_bytes 2147483648\n"
    with admin_port(200, room) as well, admin_port(503, "") as standby:
        status, findings = doctor(world.folder, "--store-admin", well, "--store-admin", standby)
    stores = [(one["level"], one["text"]) for one in findings if one["check"] == "store"]
    assert (status, [level for level, _ in stores]) == (1, ["ok", "ok", "wrong"])
    assert "1.0 of 2.0 GiB are used" in stores[0][1]
    assert "nobody listens" in stores[2][1]


def test_options_that_contradict_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (("-c", "x", "-n", "rl"), ("--store-admin", "http://a:1"), ("-c", "x", "--store-admin", "a:1")):
        status, text, errors = inside(capsys, "doctor", *arguments)
        assert (status, text) == (2, ""), arguments
        assert "--store-admin" in errors, arguments


# ------------------------------------------------------------------------------------------------------------- how checks are run


def test_one_check_that_hangs_or_breaks_costs_no_other() -> None:
    async def hangs() -> list[Finding]:
        await asyncio.sleep(3600)
        return []

    async def breaks() -> list[Finding]:
        raise KeyError("surprise")

    async def refused() -> list[Finding]:
        raise CannotLook("may not look", "ask for it")

    async def well() -> list[Finding]:
        return [Finding("well", Level.OK, "fine")]

    checks = [Check("hangs", hangs, seconds=0.05), Check("breaks", breaks), Check("refused", refused), Check("well", well)]
    found, _ = apart(lambda: asyncio.wait_for(run_checks(Examination(checks)), 20.0))
    assert [(one.check, one.level) for one in found] == [
        *(("hangs", Level.UNKNOWN), ("breaks", Level.UNKNOWN), ("refused", Level.UNKNOWN), ("well", Level.OK))
    ]
    assert ("KeyError" in found[1].text, found[2].fix) == (True, "ask for it")


def test_what_lingers_does_not_hold_up_the_result() -> None:
    gate = threading.Event()

    async def well() -> list[Finding]:
        asyncio.get_running_loop().run_in_executor(None, gate.wait, 60)
        return [Finding("well", Level.OK, "fine")]

    found, settled = apart(lambda: run_checks(Examination([Check("well", well)])))
    gate.set()
    assert ([one.check for one in found], settled) == (["well"], False)


def test_what_is_shared_is_looked_at_once_and_survives_who_gives_up() -> None:
    looked = []

    async def look() -> int:
        looked.append(1)
        await asyncio.sleep(0.1)
        return 7

    async def both() -> tuple[bool, int]:
        shared = Shared()
        gave_up = False
        try:
            async with asyncio.timeout(0.01):
                await shared.get("x", look)
        except TimeoutError:
            gave_up = True
        return gave_up, await shared.get("x", look)

    assert asyncio.run(both()) == (True, 7)
    assert looked == [1]


def test_without_the_operators_package_a_cluster_is_named_as_what_is_missing(tmp_path: Path) -> None:
    hidden = tmp_path / "kubernetes"
    hidden.mkdir()
    (hidden / "__init__.py").write_text("raise ModuleNotFoundError('gone', name='kubernetes')\n")
    done = epochkv("doctor", "-n", "rl", PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert "install epochkv[operator]" in done.stderr
    with hub_world(tmp_path / "state", **HUB_OPTIONS) as world:
        assert epochkv("doctor", "--config", str(world.folder), PYTHONPATH=str(tmp_path)).returncode == 0
