"""How a pool is reached: every form of the configuration, and errors that say what to change, whatever comes in."""

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from epochkv_fence.connection import ConfigurationError, Connection, HubRef, read_client_keys, read_root_secret
from epochkv_fence.net.keys import KeyPair, generate_keypair

CONTENT: dict[str, Any] = {"pool": {"name": "policy", "uid": "u-1"}, "hub": {"endpoint": "tcp://hub.example:7700"}}
SECRET = "5a" * 32


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What `epochkv hub` writes for its clients."""
    pair = generate_keypair()
    for name, text in (("hub.pub", generate_keypair().public), ("client.pub", pair.public), ("client.key", pair.secret)):
        (tmp_path / name).write_text(text + "\n")
    (tmp_path / "root.secret").write_text(SECRET + "\n")
    (tmp_path / "connection.json").write_text(json.dumps({**CONTENT, "hub": {**CONTENT["hub"], "credentials_dir": "."}}))
    return tmp_path


def test_a_file_or_its_folder_is_enough(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = (folder / "client.key").read_text().strip()
    for source in (folder / "connection.json", str(folder), folder):
        connection = Connection.load(source, {})
        assert (connection.pool.name, connection.pool.uid, connection.hub.endpoint) == ("policy", "u-1", "tcp://hub.example:7700")
        assert connection.hub.credentials_dir == str(folder)
        keys = connection.client_keys()
        assert (keys.public, keys.secret) == ((folder / "client.pub").read_text().strip(), secret)
        assert secret not in repr(keys) + repr(KeyPair(keys.public, secret))
        assert connection.root_secret() == bytes.fromhex(SECRET)
    monkeypatch.chdir(folder.parent)
    assert Connection.load(folder.name, {}).client_keys().hub_public == (folder / "hub.pub").read_text().strip()
    assert Connection.load(None, {"EPOCHKV_CONFIG": str(folder)}).hub.credentials_dir == str(folder)
    monkeypatch.setenv("HOME", str(folder))
    at_home = {**CONTENT, "hub": {**CONTENT["hub"], "credentials_dir": "~"}}
    (folder.parent / "other.json").write_text(json.dumps(at_home))
    assert Connection.load(folder.parent / "other.json", {}).hub.credentials_dir == str(folder)
    (folder / "connection.json").write_text(json.dumps(CONTENT), encoding="utf-8-sig")
    assert Connection.load(folder, {}).pool.uid == "u-1", "with a byte order mark"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"pool": None}, r"pool"),
        ({"pool": {"name": "p"}}, r"uid"),
        ({"pool": {"name": "p", "uid": "x" * 254}}, r"pool\.uid is"),
        ({"pool": {"name": "p", "uid": "a\nb"}}, r"pool\.uid is 'a\\nb'"),
        ({"pool": {"name": "p", "uid": "u", "user": 1}}, r"user"),
        ({"hub": {}}, r"endpoint"),
        ({"hub": {"endpoint": "hub:7700"}}, r"hub\.endpoint is 'hub:7700'; it must look like tcp://host:7700"),
        ({"hub": {"endpoint": "tcp://hub:65536"}}, r"must look like"),
        ({"hub": {"endpoint": "tcp://*:7700"}}, r"must look like"),
        ({"hub": {"endpoint": "tcp://h:1", "credential_dir": "x"}}, r"credential_dir"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        Connection.load({**CONTENT, **change}, {})


def test_nothing_given_says_what_to_give() -> None:
    for environ in ({}, {"EPOCHKV_CONFIG": "  "}):
        with pytest.raises(ConfigurationError, match=r"give the path of the pool's connection\.json, or set EPOCHKV_CONFIG"):
            Connection.load(None, environ)


def test_unreadable_files_are_named(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"absent\.json' cannot be read \(No such file"):
        Connection.load(str(folder / "absent.json"), {})
    with pytest.raises(ConfigurationError, match=r"EPOCHKV_CONFIG: .*cannot be read"):
        Connection.load(None, {"EPOCHKV_CONFIG": str(folder / "absent.json")})
    for text, said in (
        *(("a\0b", "is no path"), ("/", r"'/' is a directory without a connection\.json; give the path of that file")),
        *(("{garbage", "is not a JSON object"), ('{"pool": {"name": "p", "uid": "u"}, "lookup_wait_ms": NaN}', "is not a JSON object")),
    ):
        with pytest.raises(ConfigurationError, match=f"^EPOCHKV_CONFIG.*{said}"):
            Connection.load(None, {"EPOCHKV_CONFIG": text})
    no_object = r"connection\.json is not a JSON object"
    for content, said in ((b"[1]", no_object), (b"\xff\xfe{", no_object), (b" " * ((1 << 20) + 1), "larger than")):
        (folder / "connection.json").write_bytes(content)
        with pytest.raises(ConfigurationError, match=said):
            Connection.load(folder, {})


def test_what_is_no_file_neither_hangs_nor_fills_the_memory(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", Path("/dev/zero")):
        with pytest.raises(ConfigurationError, match="is not a regular file"):
            Connection.load(path, {})


FILES = {
    "EPOCHKV_HUB_PUBLIC_KEY": "hub.pub",
    "EPOCHKV_CLIENT_PUBLIC_KEY": "client.pub",
    "EPOCHKV_CLIENT_SECRET_KEY": "client.key",
    "EPOCHKV_ROOT_SECRET": "root.secret",
}


@pytest.mark.parametrize("variable", FILES)
@pytest.mark.parametrize("by", ["file", "variable"])
def test_a_missing_or_broken_key_is_named_and_never_shown(folder: Path, by: str, variable: str) -> None:
    environ = {name: (folder / file).read_text() for name, file in FILES.items()} if by == "variable" else {}
    file, broken = folder / FILES[variable], "c0ffee" * 7

    def read() -> None:
        connection = Connection.load(folder if by == "file" else CONTENT, environ)
        connection.client_keys()
        connection.root_secret()

    read()
    file.write_text(broken)
    environ |= {variable: broken} if environ else {}
    named = file.name.replace(".", r"\.") if by == "file" else variable
    with pytest.raises(ConfigurationError, match=named) as caught:
        read()
    assert broken not in str(caught.value)
    file.unlink()
    environ.pop(variable, None)
    missing = "" if by == "file" else " is not set and the configuration has no hub.credentials_dir"
    with pytest.raises(ConfigurationError, match=named + missing):
        read()


def test_a_pair_that_is_being_replaced_is_read_again(folder: Path) -> None:
    fresh = generate_keypair()
    (folder / "client.key").write_text(fresh.secret)
    with pytest.raises(ConfigurationError, match="does not belong"):
        read_client_keys(HubRef("tcp://h:1", str(folder)))
    thread = threading.Timer(0.02, (folder / "client.pub").write_text, (fresh.public,))
    thread.start()
    try:
        assert read_client_keys(HubRef("tcp://h:1", str(folder))).public == fresh.public
    finally:
        thread.join()


@pytest.mark.parametrize("name", ["client.key", "root.secret"])
def test_a_file_that_is_away_while_the_folder_changes_is_read_again(folder: Path, name: str) -> None:
    """As where the kubelet moves `..data`, or a launcher copies the folder while engines start."""
    (folder / name).rename(folder / "away")
    thread = threading.Timer(0.02, lambda: (folder / "away").rename(folder / name))
    thread.start()
    try:
        (read_root_secret if name == "root.secret" else read_client_keys)(HubRef("tcp://h:1", str(folder)))
    finally:
        thread.join()


def test_a_folder_of_keys_that_is_not_there_is_named_with_its_field(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for place, named in (
        ("absent", r"hub\.credentials_dir is 'absent' \(in the working directory .* give an absolute path\), which is not there"),
        (str(folder / "hub.pub"), r"hub\.credentials_dir is '.*/hub\.pub', which is no folder; give the folder with hub\.pub"),
    ):
        text = json.dumps({**CONTENT, "hub": {**CONTENT["hub"], "credentials_dir": place}})
        connection = Connection.load(None, {"EPOCHKV_CONFIG": text})
        with pytest.raises(ConfigurationError, match=named):
            connection.client_keys()
        with pytest.raises(ConfigurationError, match=rf"hub\.credentials_dir is '{place}'.*; give the folder with the pool's root\.secret"):
            connection.root_secret()
    inline = Connection.load({**CONTENT, "hub": {**CONTENT["hub"], "credentials_dir": "."}}, {})
    assert inline.client_keys().public == (folder / "client.pub").read_text().strip()
    (folder / "client.key").unlink()
    with pytest.raises(ConfigurationError, match=r"credentials_dir is '\.' .*client\.key: cannot read the key \(No such file") as caught:
        inline.client_keys()
    assert "STATE/client of `epochkv hub`, or the mounted Secret <pool>-fence" in str(caught.value)


def test_nesting_without_end_is_an_error_of_ours() -> None:
    with pytest.raises(ConfigurationError):
        Connection.load('{"pool":' * 50_000, {})
    loop: dict[str, Any] = {}
    loop["pool"] = loop
    with pytest.raises(ConfigurationError):
        Connection.load(loop, {})
