"""What `epochkv hub` says about keys and addresses, and that a start which fails leaves nothing behind."""

from __future__ import annotations

import json
import logging
import shutil
import socket
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from epochkv_fence.connection import Connection
from epochkv_fence.net import generate_keypair
from epochkv_fence.standalone.credentials import exposed_files
from epochkv_fence.standalone.hub import HubError, HubOptions, StandaloneHub, split_address, split_listen
from hack.waiting import eventually
from tests.support.fence import LoopThread
from tests.support.hub import Agents, HubProcess, epochkv, using


def copy_with(folder: Path, target: Path, change: Callable[[Path], None]) -> Path:
    shutil.copytree(folder, target)
    change(target)
    return target


def foreign_key(folder: Path) -> None:
    pair = generate_keypair()
    (folder / "client.pub").write_text(pair.public)
    (folder / "client.key").write_text(pair.secret)


def foreign_hub(folder: Path) -> None:
    (folder / "hub.pub").write_text(generate_keypair().public)


def test_the_log_says_who_is_refused_once(tmp_path: Path) -> None:
    with HubProcess(tmp_path / "state") as hub:
        stranger = copy_with(hub.folder, tmp_path / "stranger", foreign_key)
        for _ in range(3):
            assert epochkv("status", "--timeout", "3", config=stranger).returncode == 4
        refused = [line for line in hub.text().splitlines() if "is refused" in line]
        assert len(refused) == 1, hub.text()
        assert "WARNING a client at 127.0.0.1 is refused: its key is of no pool of this hub, or was retired. Give it" in refused[0]
        lost = copy_with(hub.folder, tmp_path / "lost", foreign_hub)
        assert epochkv("status", "--timeout", "3", config=lost).returncode == 4
        eventually(lambda: "a connection failed its CURVE handshake: a client with the hub.pub of another hub" in hub.text())
        assert "is refused" not in "".join(hub.text().splitlines()[-1:])


def test_the_log_says_that_keys_were_retired_and_who_is_refused_then(tmp_path: Path) -> None:
    with HubProcess(tmp_path / "state", "--lease-seconds", "1") as hub:
        old = copy_with(hub.folder, tmp_path / "old", lambda folder: None)
        with Agents(old) as agents:
            agent, _ = agents.start("keeps-its-key")
            eventually(lambda: using(agent, 0))
            assert epochkv("keys", "rotate", "--state", str(hub.state)).returncode == 0
            eventually(lambda: "a new client key is accepted; the one before as well" in hub.text())
            assert "is refused" not in hub.text()
            assert epochkv("keys", "retire", "--state", str(hub.state)).returncode == 0
            eventually(lambda: "the client key before is not accepted any more: `epochkv keys retire`" in hub.text())
            eventually(lambda: "a client at 127.0.0.1 is refused" in hub.text(), "the engine dials again", 30)


def test_the_log_says_that_key_files_were_made_again(tmp_path: Path) -> None:
    hub = HubProcess(tmp_path / "state").start()
    assert f"made the keys of a new pool in {hub.state}" in hub.text()
    (hub.folder / "client.key").unlink()
    eventually(lambda: "the client folder did not have the pool's keys (removed, changed" in hub.text())
    assert hub.end() == 0
    old = copy_with(hub.folder, tmp_path / "old", lambda folder: None)
    (hub.folder / "client.pub").write_text("x")
    hub.start()
    assert f"{hub.folder} did not have the pool's keys; they are written again" in hub.text()
    assert hub.end() == 0
    (hub.state / "keys.json").unlink()
    hub.start()
    assert (
        f"{hub.state / 'keys.json'} is missing, so the hub made new keys and rejects engines and trainers with the old ones" in hub.text()
    )
    assert epochkv("status", config=hub.folder).returncode == 0
    assert epochkv("status", "--timeout", "3", config=old).returncode == 4
    assert hub.end() == 0


def test_secrets_that_others_can_read_are_named_with_the_remedy(tmp_path: Path) -> None:
    hub = HubProcess(tmp_path / "state").start()
    assert "can be read by others" not in hub.text()
    assert exposed_files(hub.state) == []
    assert hub.end() == 0
    paths = [hub.state / "keys.json", hub.folder / "client.key", hub.folder / "root.secret"]
    for path in (*paths, hub.folder / "hub.pub"):
        path.chmod(0o644)
    hub.start()
    assert hub.end() == 0
    for path in paths:
        assert f"{path} can be read by others (mode 0644), so others can speak for the pool; run chmod go-rwx {path}" in hub.text()
    assert "hub.pub can be" not in hub.text()


# --------------------------------------------------------------------------------------------------------------- addresses


@pytest.mark.parametrize("option", ["listen", "metrics"])
def test_a_hub_that_cannot_listen_leaves_nothing_behind(tmp_path: Path, option: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "epochkv.hub")
    kept = tmp_path / "kept"
    kept.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        listen, metrics = (f"tcp://{address}", "") if option == "listen" else ("tcp://127.0.0.1:0", address)
        for state in (kept / "a" / "b", kept):
            with (
                closing(LoopThread()) as loop,
                pytest.raises(HubError, match=f"--{option} .* cannot be listened on: Address already in use(;|$)"),
            ):
                loop.run(StandaloneHub(HubOptions("policy", listen, state, metrics=metrics)).start())
            assert kept.exists()
            assert not (kept / "a").exists()
            assert "made the keys" not in caplog.text
        uid = json.loads((kept / "keys.json").read_text())["pool_uid"]  # it was there before: left as it is
    with closing(LoopThread()) as loop:
        hub = StandaloneHub(HubOptions("policy", "tcp://127.0.0.1:0", kept))
        loop.run(hub.start())
        assert hub.uid == uid
        loop.run(hub.stop())


@pytest.mark.parametrize(
    "name", ["", " ", "Policy", "-policy", "policy-", "a..b", ".a", "a.", "a.-b", "a_b", "ns/policy", "policy\n", "\u00e9", "a" * 254]
)
def test_a_pool_has_a_name_that_kubernetes_would_take(tmp_path: Path, name: str) -> None:
    with pytest.raises(HubError) as caught:
        StandaloneHub(HubOptions(name, "tcp://127.0.0.1:0", tmp_path / "state"))
    assert str(caught.value).startswith(f"--pool is {name!r}; give a name as Kubernetes has them: at most 253 characters, ")
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("name", ["policy", "p", "7", "a-b.c-d", "a--b", "a" * 253])
def test_names_that_kubernetes_takes(tmp_path: Path, name: str) -> None:
    assert HubOptions(name, "tcp://127.0.0.1:0", tmp_path).checked().pool == name


@pytest.mark.parametrize("listen", ["tcp://::1:7700", "tcp://:::7700", "tcp://2001:db8::7:7700", "tcp://fe80::1"])
def test_an_ipv6_address_needs_brackets(listen: str) -> None:
    with pytest.raises(HubError, match=r"an IPv6 address needs brackets, such as tcp://\[::\]:7700"):
        split_listen(listen)
    with pytest.raises(HubError, match="an IPv6 address needs brackets"):
        split_address(listen.removeprefix("tcp://"))
    assert split_listen("tcp://[::1]:7700") == ("[::1]", 7700)


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists() or not Path("/proc/net/if_inet6").read_text(), reason="no IPv6 here")
def test_ipv6_from_the_engine_to_the_metrics(tmp_path: Path) -> None:
    with closing(LoopThread()) as loop:
        hub = StandaloneHub(HubOptions("policy", "tcp://[::1]:0", tmp_path / "state", metrics="[::1]:0"))
        loop.run(hub.start())
        with Agents(hub.connection_file.parent) as agents:
            assert Connection.load(hub.connection_file, {}).hub.endpoint.startswith("tcp://[::1]:")
            agent, _ = agents.start()
            eventually(lambda: using(agent, 0))
            assert epochkv("reset", config=hub.connection_file).returncode == 0
            got = subprocess.run(["curl", "-sg", f"http://[::1]:{hub.metrics_port}/healthz"], capture_output=True, text=True, check=True)
            assert got.stdout == "ok\n"
            loop.run(hub.stop())
