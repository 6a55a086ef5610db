"""Keys and client folder of a standalone hub: replaced as a whole, repaired after a kill, bound to their pool."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from epochkv_fence.client import Connection, Pool
from epochkv_fence.standalone.authority import StateError
from epochkv_fence.standalone.credentials import Keys, ensure_keys, read_keys, retire_previous, rotate_keys, write_client
from hack.waiting import eventually
from tests.support.hub import hub_world, together


def folder_fits(state: Path, keys: Keys) -> None:
    """The client folder is that of these keys."""
    connection = Connection.load(state / "client", {})
    found = connection.client_keys()
    assert (found.public, found.secret, found.hub_public) == (keys.client.public, keys.client.secret, keys.hub.public)
    assert connection.root_secret().hex() == keys.root_secret
    assert connection.pool.uid == keys.pool_uid


def test_keys_are_made_once_and_belong_to_one_pool(tmp_path: Path) -> None:
    keys = ensure_keys(tmp_path, "uid-1")
    assert ensure_keys(tmp_path, "uid-1") == keys == read_keys(tmp_path)
    assert len({keys.client.public, keys.hub.public}) == 2
    write_client(tmp_path, "policy", "tcp://h:1")
    folder_fits(tmp_path, keys)
    with pytest.raises(StateError, match=r"belongs to pool uid uid-1, whose record is missing"):
        ensure_keys(tmp_path, "uid-2")


def test_a_rotation_keeps_the_key_before_and_everything_else(tmp_path: Path) -> None:
    first = ensure_keys(tmp_path, "uid-1")
    write_client(tmp_path, "policy", "tcp://h:1")
    second = rotate_keys(tmp_path, 100.0)
    assert second.accepted == (second.client.public, first.client.public)
    assert (second.hub, second.root_secret, second.pool_uid) == (first.hub, first.root_secret, first.pool_uid)
    folder_fits(tmp_path, second)
    (tmp_path / "client" / "client.key").write_text(first.client.secret)  # it broke off
    with pytest.raises(StateError, match="the key before is still accepted for 100 s; rotate again afterwards, or drop it now"):
        rotate_keys(tmp_path, 100.0)
    folder_fits(tmp_path, second)
    assert retire_previous(tmp_path).accepted == (second.client.public,)
    assert retire_previous(tmp_path).accepted == (second.client.public,)
    third = rotate_keys(tmp_path, 0.0)
    assert rotate_keys(tmp_path, 0.0).accepted[1] == third.client.public  # its grace was over


def test_of_many_rotations_at_once_one_is_done(tmp_path: Path) -> None:
    ensure_keys(tmp_path, "uid-1")

    def rotate() -> Any:
        try:
            return rotate_keys(tmp_path, 100.0)
        except StateError:
            return None

    done = [keys for keys in together([rotate] * 8) if keys is not None]
    assert done == [read_keys(tmp_path)]


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"version": 1}'),
        *({"version": 2}, {"root_secret": "00"}, {"client": {"public": "x", "secret": "y"}}, {"previous": {"public": "x", "retire_at": 0}}),
    ],
)
def test_what_is_no_keys_or_was_changed_by_hand_is_named(tmp_path: Path, content: bytes | dict[str, Any]) -> None:
    ensure_keys(tmp_path, "u")
    path = tmp_path / "keys.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps({**json.loads(path.read_text()), **content}).encode())
    for call in (lambda: ensure_keys(tmp_path, "u"), lambda: rotate_keys(tmp_path, 1.0), lambda: retire_previous(tmp_path)):
        with pytest.raises(StateError, match=r"keys\.json holds no keys that this version can read"):
            call()


KILLED_ROTATION = """
import os, sys
from pathlib import Path
from epochkv_fence.standalone import credentials
syncs = iter(range(int(sys.argv[2])))
os.fsync = lambda file: next(syncs, None) is None and os._exit(9)
credentials.rotate_keys(Path(sys.argv[1]), 0.0)
"""


@pytest.mark.parametrize("syncs", range(6))
def test_a_rotation_that_is_killed_is_repaired_at_the_next_start(tmp_path: Path, syncs: int) -> None:
    """Before and after each of three files is replaced: keys.json, then both that are new in the folder."""
    first = ensure_keys(tmp_path, "uid-1")
    write_client(tmp_path, "policy", "tcp://h:1")
    done = subprocess.run([sys.executable, "-c", KILLED_ROTATION, str(tmp_path), str(syncs)], check=False)
    assert done.returncode == 9
    keys = ensure_keys(tmp_path, "uid-1")
    assert (keys == first) == (syncs == 0), "always whole"
    write_client(tmp_path, "policy", "tcp://h:1")
    folder_fits(tmp_path, keys)


def test_a_running_hub_repairs_what_a_killed_rotation_left_before_it_retires_a_key(tmp_path: Path) -> None:
    with hub_world(tmp_path / "state") as world:
        hub, state = world.hub, world.options.state
        assert hub is not None
        old = (world.folder / "client.pub").read_text().strip()
        obstacle = world.folder / "client.pub.part"
        obstacle.mkdir()  # the folder cannot be written either, as on a full disk
        done = subprocess.run([sys.executable, "-c", KILLED_ROTATION, str(state), "1"], check=False)
        assert done.returncode == 9
        eventually(lambda: len(hub.keys.config.client_public_keys) == 2, "the hub takes the new key all the same")
        time.sleep(3.0)  # three checks
        assert old in hub.keys.config.client_public_keys  # its grace is over, and the folder has no other
        assert (world.folder / "client.pub").read_text().strip() == old
        obstacle.rmdir()
        eventually(lambda: len(hub.keys.config.client_public_keys) == 1, "the old key goes")
        keys = read_keys(state)
        assert keys is not None
        assert hub.keys.config.client_public_keys == keys.accepted == (keys.client.public,)
        folder_fits(state, keys)
        with Pool.connect(world.folder, 20) as pool:
            assert pool.reset().published


def test_a_key_that_was_not_judged_is_not_retired(tmp_path: Path) -> None:
    """Somebody rotates again between the hub's check and what it does about it."""
    first = ensure_keys(tmp_path, "uid-1")
    second = rotate_keys(tmp_path, 0.0)
    third = rotate_keys(tmp_path, 1000.0)
    kept = retire_previous(tmp_path, first.client.public)
    assert kept == third == read_keys(tmp_path)
    assert kept.accepted == (third.client.public, second.client.public)
    assert retire_previous(tmp_path, second.client.public).accepted == (third.client.public,)


HOLDER = """
import sys, time
from pathlib import Path
from epochkv_fence.standalone import credentials
with credentials._locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_keys_that_somebody_holds_are_not_waited_for_for_ever(tmp_path: Path) -> None:
    keys = ensure_keys(tmp_path, "uid-1")
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        for call in (lambda: rotate_keys(tmp_path, 1.0), lambda: ensure_keys(tmp_path, "uid-1")):
            with pytest.raises(StateError, match=rf"keys\.lock has been held by process {holder.pid} for 5 s"):
                call()
        holder.kill()
    assert ensure_keys(tmp_path, "uid-1") == keys
