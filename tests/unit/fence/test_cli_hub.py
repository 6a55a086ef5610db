"""`epochkv hub` and `epochkv keys` as people and scripts use them: what they leave behind, and how they end."""

import fcntl
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path
from unittest.mock import Mock

import pytest

from epochkv_fence.common import lease_clock
from epochkv_fence.connection import ConfigurationError
from epochkv_fence.net.keys import generate_keypair
from epochkv_fence.protocol.pool import AuthorityError
from epochkv_fence.standalone.authority import StateError
from epochkv_fence.standalone.hub import HubOptions, StandaloneHub
from hack.loopback import free_port, has_ipv6
from hack.waiting import eventually
from tests.support.cli import inside
from tests.support.fence import LoopThread
from tests.support.hub import Agents, HubProcess, altered, epochkv, using


# ------------------------------------------------------------------------------------------------------------------ hub
def test_a_hub_writes_what_clients_need_for_this_user_alone(tmp_path: Path) -> None:
    with HubProcess(tmp_path / "a state") as hub:
        names = sorted(path.name for path in hub.folder.iterdir())
        assert names == ["client.key", "client.pub", "connection.json", "hub.pub", "root.secret"]
        for path in (*hub.folder.iterdir(), hub.state / "keys.json", hub.state / "state.db"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
        assert stat.S_IMODE(hub.folder.stat().st_mode) == stat.S_IMODE(hub.state.stat().st_mode) == 0o700
        content = json.loads((hub.folder / "connection.json").read_text())
        assert content["hub"] == {"endpoint": f"tcp://127.0.0.1:{hub.port}", "credentials_dir": "."}
        assert (sorted(content), content["pool"]["name"]) == (["hub", "pool"], "policy")
        assert f"export EPOCHKV_CONFIG='{hub.folder / 'connection.json'}'\n" in hub.text()
        copy = tmp_path / "elsewhere"
        subprocess.run(["cp", "-r", str(hub.folder), str(copy)], check=True)
        assert epochkv("reset", config=copy).returncode == 0


def test_started_again_it_continues_the_pool_and_keeps_what_was_added_to_the_file(tmp_path: Path) -> None:
    hub = HubProcess(tmp_path / "state", "--lease-seconds", "1", "--log-format", "json").start()
    with Agents(hub.folder) as agents:
        agent, _ = agents.start()
        eventually(lambda: using(agent, 0))
        assert epochkv("reset", config=hub.folder).returncode == 0
        path = hub.folder / "connection.json"
        content = json.loads(path.read_text())
        path.write_text(json.dumps({**content, "local": {"capacity_bytes": 1 << 30}}))
        secret = (hub.folder / "root.secret").read_text()
        assert hub.end() == 0
        assert "ended by a signal" in hub.text()
        hub.start()
        again = json.loads(path.read_text())
        assert again == {**content, "local": {"capacity_bytes": 1 << 30}}
        assert (hub.folder / "root.secret").read_text() == secret
        eventually(lambda: using(agent, 1), "the engine goes on", 30)
        assert "leading: epoch 1, published 1" in hub.text()
        assert hub.text().count("epoch 1 recorded, asked for by trainer") == 1, hub.text()  # when it was asked for, not at the start
        done = epochkv("reset", "-o", "json", config=hub.folder)
        assert json.loads(done.stdout)["epoch"] == 2
        hub.kill()
        hub.start()
        assert json.loads(epochkv("status", "-o", "json", config=hub.folder).stdout)["published"] == 2
        assert hub.end(signal.SIGINT) == 0
        hub.end()
        assert all({"timestamp", "level", "event"} <= json.loads(line).keys() for line in hub.text().splitlines())
        for name in ("client.key", "root.secret"):
            assert (hub.folder / name).read_text().strip() not in hub.text()


def test_a_hub_on_a_disk_that_hangs_ends_when_it_is_told_to(tmp_path: Path) -> None:
    hub = HubProcess(tmp_path / "state")
    hub.state.mkdir()
    os.mkfifo(hub.state / "keys.json")  # reading it never returns
    hub.start(wait=False)
    eventually((hub.state / "keys.lock").exists, "it is about to read its keys", 60)
    assert hub.end() == 1
    assert "something stalls, perhaps a disk" in hub.text()


def test_a_log_that_nobody_reads_costs_no_lease(tmp_path: Path) -> None:
    hub = HubProcess(tmp_path / "state", "--lease-seconds", "1", "--log-format", "json")
    os.mkfifo(hub.log)
    pipe = os.open(hub.log, os.O_RDWR | os.O_NONBLOCK)
    os.write(pipe, bytes(fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, 4096)))
    hub.start(wait=False)
    try:
        eventually((hub.folder / "connection.json").exists, "it serves", 60)
        with Agents(hub.folder) as agents:
            agent, _ = agents.start()
            eventually(lambda: using(agent, 0))
            time.sleep(3)
            assert using(agent, 0)
    finally:
        assert hub.end() == 0
        os.close(pipe)


def test_a_second_hub_is_told_who_holds_the_state(tmp_path: Path) -> None:
    with HubProcess(tmp_path / "state") as hub:
        second = epochkv("hub", "--pool", "policy", "--listen", "tcp://127.0.0.1:0", "--state", str(hub.state))
        assert second.returncode == 5
        assert f"is held by process {hub.child.pid}, which serves this pool" in second.stderr
        other = epochkv("hub", "--pool", "policy", "--listen", f"tcp://127.0.0.1:{hub.port}", "--state", str(tmp_path / "other"))
        assert other.returncode == 2
        assert f"--listen tcp://127.0.0.1:{hub.port}" in other.stderr


def test_a_hub_whose_state_is_removed_ends_with_status_6(tmp_path: Path) -> None:
    hub = HubProcess(tmp_path / "state", "--lease-seconds", "2").start()
    with Agents(hub.folder) as agents:
        agent, _ = agents.start()
        eventually(lambda: using(agent, 0))
        for path in hub.state.glob("state.db*"):
            path.unlink()
        assert hub.child.wait(30) == 6
        assert "was removed or replaced under this hub" in hub.text()
        assert f"WARNING the state directory {hub.state} was removed or replaced; stepping down from " in hub.text()
        assert "another hub leads" not in hub.text()
        eventually(lambda: lease_clock() >= agent.view.lease_until, "the engine leaves with its lease")


def test_metrics_and_health(tmp_path: Path) -> None:
    port = free_port()
    with HubProcess(tmp_path / "state", "--metrics", f"127.0.0.1:{port}") as hub:
        with Agents(hub.folder) as agents:
            agent, _ = agents.start()
            eventually(lambda: using(agent, 0))
            assert epochkv("reset", config=hub.folder).returncode == 0

            def get(path: str) -> tuple[int, str]:
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
                        return answer.status, answer.read().decode()
                except urllib.error.HTTPError as error:
                    return error.code, error.read().decode()

            assert get("/healthz") == (200, "ok\n")
            assert get("/other")[0] == 404
            status, text = get("/metrics")
            assert status == 200
            assert 'epochkv_pool_published_epoch{namespace="",pool="policy"} 1' in text.splitlines()
            with socket.create_connection(("127.0.0.1", port)) as idle:  # a connection that says nothing holds nobody up
                assert get("/healthz")[0] == 200
                idle.sendall(b"\xff\xff\r\n\r\n")
                assert get("/healthz")[0] == 200
            other = ("hub", "--pool", "p", "--listen", "tcp://127.0.0.1:0", "--state", str(tmp_path / "x"))
            taken = epochkv(*other, "--metrics", f"127.0.0.1:{port}")
            assert taken.returncode == 2
            assert "--metrics" in taken.stderr


# ----------------------------------------------------------------------------------------------------------------- keys
def test_keys_are_rotated_under_a_running_hub(tmp_path: Path) -> None:
    with HubProcess(tmp_path / "state", "--lease-seconds", "1") as hub:
        old = tmp_path / "old"
        subprocess.run(["cp", "-r", str(hub.folder), str(old)], check=True)
        agents, fixed = Agents(hub.folder), Agents(old)
        try:
            agent, _ = agents.start("reads-its-keys-again")
            stays, _ = fixed.start("keeps-its-keys")
            eventually(lambda: using(agent, 0) and using(stays, 0))
            done = epochkv("keys", "rotate", "--state", str(hub.state))
            assert done.stdout == f"new client key in {hub.folder}; the one before is accepted for 86400 s\n", done.stderr
            eventually(lambda: "a new client key is accepted" in hub.text(), "the hub notices")
            assert epochkv("status", config=hub.folder).returncode == 0
            assert epochkv("status", config=old).returncode == 0
            again = epochkv("keys", "rotate", "--state", str(hub.state))
            assert again.returncode == 5
            assert "the key before is still accepted" in again.stderr
            stays.stop()
            assert epochkv("keys", "retire", "--state", str(hub.state)).returncode == 0
            eventually(lambda: epochkv("status", "--timeout", "5", config=old).returncode == 4, "the old key goes", 60)
            lease = agent.view.lease_until
            eventually(lambda: agent.view.lease_until > lease and using(agent, 0), "the other engine never lost its lease")
            assert epochkv("keys", "rotate", "--state", str(hub.state)).returncode == 0
            assert epochkv("keys", "retire", "--state", str(hub.state)).returncode == 0
            eventually(lambda: epochkv("status", config=hub.folder).returncode == 0)
            eventually(lambda: agent.view.lease_until > lease_clock() and using(agent, 0), "it has taken the third key")
        finally:
            agents.stop()
            fixed.stop()


def test_keys_of_a_directory_that_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("rotate", "retire"):
        done = epochkv("keys", command, "--state", str(tmp_path))
        assert done.returncode == 5
        assert "holds no keys; give the --state directory" in done.stderr
        assert epochkv("keys", command, "--state", str(tmp_path / "absent")).returncode == 5
    for error, status in ((StateError("it has another pool"), 5), (AuthorityError("the disk is full"), 1)):  # only the latter may pass
        monkeypatch.setattr("epochkv_fence.cli.hub.retire_previous", Mock(side_effect=error))
        assert inside(capsys, "keys", "retire", "--state", "x") == (status, "", f"epochkv: {error}\n")


# ---------------------------------------------------------------------------------------------------------- words of the log
def copy_with(folder: Path, target: Path, **files: str) -> Path:
    shutil.copytree(folder, target)
    for name, text in files.items():
        (target / name.replace("_", ".")).write_text(text)
    return target


def test_the_log_says_who_is_refused_once(tmp_path: Path) -> None:
    with HubProcess(tmp_path / "state") as hub:
        pair = generate_keypair()
        stranger = copy_with(hub.folder, tmp_path / "stranger", client_pub=pair.public, client_key=pair.secret)
        for _ in range(3):
            assert epochkv("status", "--timeout", "3", config=stranger).returncode == 4
        refused = [line for line in hub.text().splitlines() if "rejected a client" in line]
        assert len(refused) == 1, hub.text()
        why = "its key is not authorized for any pool of this hub, or was retired. Give it"
        assert f"WARNING rejected a client at 127.0.0.1: {why}" in refused[0]
        lost = copy_with(hub.folder, tmp_path / "lost", hub_pub=pair.public)
        assert epochkv("status", "--timeout", "3", config=lost).returncode == 4
        eventually(lambda: "a connection failed its CURVE handshake: a client with the hub.pub of another hub" in hub.text())
        assert "rejected a client" not in "".join(hub.text().splitlines()[-1:])


@pytest.mark.parametrize("name", ["", "Policy", "-policy", "a..b", "a.-b", "ns/policy", "policy\n", "a" * 254])
def test_a_pool_has_a_name_that_kubernetes_would_take(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        StandaloneHub(HubOptions(name, "tcp://127.0.0.1:0", tmp_path / "state"))
    assert str(caught.value).startswith(f"--pool is {name!r}; give a name as Kubernetes has them: at most 253 characters, ")
    assert not (tmp_path / "state").exists()
    assert HubOptions("a-b.c-d", "tcp://127.0.0.1:0", tmp_path).checked().pool == "a-b.c-d"


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
@pytest.mark.parametrize("dialled", ["127.0.0.1", "[::1]"])
def test_a_hub_listens_on_both_families(tmp_path: Path, dialled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(socket, "getfqdn")  # which asks a DNS that may hang
    with closing(LoopThread()) as loop:
        hub = StandaloneHub(HubOptions("policy", "tcp://*:0", tmp_path / "state", metrics="*:0"))
        loop.run(hub.start())
        port = hub.server.endpoint.rpartition(":")[2]
        dialling = altered(hub.connection_file.parent, tmp_path / "client", hub={"endpoint": f"tcp://{dialled}:{port}"})
        assert epochkv("reset", "--no-wait", config=Path(dialling)).returncode == 0
        url = f"http://{dialled}:{hub.metrics_port}/healthz"
        assert subprocess.run(["curl", "-sg", url], capture_output=True, text=True, check=True).stdout == "ok\n"
        loop.run(hub.stop())


@pytest.mark.skipif(not has_ipv6() or os.geteuid() != 0, reason="no IPv6 here, or this user may not give names to addresses")
def test_a_hub_whose_name_has_an_ipv6_address_alone(tmp_path: Path) -> None:
    with closing(LoopThread()) as loop:
        hub = StandaloneHub(HubOptions("policy", "tcp://[::1]:0", tmp_path / "state"))
        loop.run(hub.start())
        config = hub.connection_file
        config.write_text(config.read_text().replace("[::1]", "hub.test"))
        (tmp_path / "hosts").write_text("127.0.0.1 localhost\n::1 hub.test\n")
        line = f"mount --bind {tmp_path / 'hosts'} /etc/hosts && exec {sys.executable} -m epochkv_fence.cli status --config {config}"
        said = subprocess.run(["unshare", "--mount", "sh", "-c", line], capture_output=True, text=True, timeout=60, check=False)
        assert "policy" in said.stdout, said
        loop.run(hub.stop())
