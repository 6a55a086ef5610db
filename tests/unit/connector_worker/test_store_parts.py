"""What the store client is made of: names of objects, the ends around them, how many one call carries, and what is said of it."""

import logging
import re
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from unittest.mock import Mock

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from epochkv_connector.naming import identity as keys
from epochkv_connector.store import client as envelope
from epochkv_connector.store.client import CallSize, Defect, StoreClient, Ticket, Transfer, first_chunk
from epochkv_connector.store.connection import AGAIN_SECONDS, Counters, StoreConnection, StoreOutcome, StoreSettings, why_setup_failed
from epochkv_fence.common import Seldom


@pytest.mark.parametrize("text", ["", "a/b/e1", "12345678/0123456789abcdef/e01/w0123456789abcdef", "12345678/0123456789abcdef/e1"])
def test_what_is_no_namespace_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a namespace"):
        keys.epoch_of(text)


@given(st.integers(1, 2000), st.integers(0, 4000))
def test_older_pattern_compares_numbers(epoch: int, other: int) -> None:
    pattern = re.compile(keys.older_pattern("0a1b2c3d", epoch, "0123456789abcdef", 0))
    key = f"0a1b2c3d/0123456789abcdef/e{other}/w{'0' * 16}/g0/r0/00"
    assert bool(pattern.search(key)) == (other < epoch)
    assert not pattern.search("1" + key)
    assert not pattern.search(key.replace("0a1b2c3d", "0a1b2c3e"))


def test_older_pattern_takes_one_group_of_one_layout_or_all_other_layouts() -> None:
    fingerprint = "0123456789abcdef"
    pattern = re.compile(keys.older_pattern("0a1b2c3d", 12, fingerprint + "0" * 48, group=1))
    key = f"0a1b2c3d/{fingerprint}/e9/w{fingerprint}/g1/r0/00"
    assert pattern.search(key)
    for other in (key.replace("/g1/", "/g10/"), key.replace("/g1/", "/g0/"), key.replace("0123", "0124"), key.replace("/e9/", "/e12/")):
        assert other != key
        assert not pattern.search(other)
    others = re.compile(keys.older_pattern("0a1b2c3d", 12, fingerprint + "0" * 48, None))
    assert others.search(key.replace("0123", "0124"))
    for own in (key, key.replace("/g1/", "/g7/"), key.replace("0123", "0124").replace("/e9/", "/e12/")):
        assert not others.search(own)


def test_every_block_has_an_owner_and_replicas_share_the_work() -> None:
    owners = [keys.replica_owner(struct.pack("<I", number), 4) for number in range(400)]
    assert set(owners) == set(range(4))
    assert min(owners.count(rank) for rank in range(4)) > 50


# -- envelope -----------------------------------------------------------------------------------------------------------------

DIGEST = b"d" * 16
LAYOUT = b"l" * 16
END = 128
payloads = st.binary(min_size=1, max_size=300)


def sealed(payload: bytes, checksum: bool = True) -> bytearray:
    raw = bytearray(bytes(END) + payload + bytes(END))
    envelope.seal(memoryview(raw), DIGEST, LAYOUT, checksum=checksum)
    return raw


@given(payloads, st.booleans())
def test_the_format_is_what_the_module_says(payload: bytes, checksum: bool) -> None:
    raw = bytes(sealed(payload, checksum=checksum))
    assert raw[END:-END] == payload
    for end, magic in ((raw[:END], b"EPOCHKV<"), (raw[-END:], b">EPOCHKV")):
        assert end[:8] == magic
        codec, flags, zero = struct.unpack_from("<HHI", end, 8)
        assert (codec, flags, zero) == (2, int(checksum), 0)
        assert end[16:32] == DIGEST
        assert end[32:48] == LAYOUT
        assert struct.unpack_from("<Q", end, 48)[0] == len(payload)
        assert end[56:72] == (xxhash.xxh3_128(payload).digest() if checksum else bytes(16))
        assert end[72:120] == bytes(48)
        assert struct.unpack_from("<Q", end, 120)[0] == xxhash.xxh3_64(end[:120]).intdigest()


@given(payloads, st.data())
def test_any_change_is_found(payload: bytes, data: st.DataObject) -> None:
    raw = sealed(payload)
    position = data.draw(st.integers(0, len(raw) - 1))
    raw[position] ^= data.draw(st.integers(1, 255))
    assert envelope.find_defect(memoryview(raw), DIGEST, LAYOUT, checksum=True) is not None
    in_an_end = position < END or position >= len(raw) - END
    assert (envelope.find_defect(memoryview(raw), DIGEST, LAYOUT, checksum=False) is not None) == in_an_end


@given(payloads, payloads)
def test_ends_of_two_writes_do_not_fit_together(first: bytes, second: bytes) -> None:
    one, other = sealed(first), sealed(second)
    torn = memoryview(one[:-END] + other[-END:])
    defect = envelope.find_defect(torn, DIGEST, LAYOUT, checksum=False)
    if len(first) != len(second):
        assert defect is Defect.LENGTH
    else:
        assert defect is (None if first == second else Defect.TORN)


def test_each_defect_has_its_name() -> None:
    good = sealed(b"payload")

    def defect(raw: bytes | bytearray, digest: bytes = DIGEST, layout: bytes = LAYOUT) -> Defect | None:
        return envelope.find_defect(memoryview(bytearray(raw)), digest, layout, checksum=True)

    assert defect(good) is None
    assert defect(bytes(len(good))) is Defect.MAGIC
    assert defect(good, b"e" * 16) is Defect.DIGEST
    assert defect(good, layout=b"m" * 16) is Defect.LAYOUT
    assert defect(good[:END] + b"x" + good[END:], layout=b"m" * 16) is Defect.LAYOUT  # the length says less
    assert defect(good[:END] + b"x" + good[END:]) is Defect.LENGTH
    assert defect(sealed(b"payload", checksum=False)) is Defect.NO_CHECKSUM
    assert defect(good[:END] + b"PAYLOAD" + good[-END:]) is Defect.CHECKSUM
    assert defect(good[:20] + b"!" + good[21:]) is Defect.SEALED
    other_codec = bytearray(good)
    for start in (0, len(good) - END):
        struct.pack_into("<H", other_codec, start + 8, 3)
        struct.pack_into("<Q", other_codec, start + 120, xxhash.xxh3_64_intdigest(bytes(other_codec[start : start + 120])))
    assert defect(other_codec) is Defect.CODEC


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 8), st.integers(1, 100))
def test_chunks_cover_a_request_in_order_within_both_limits(sizes: list[int], max_keys: int, max_bytes: int) -> None:
    left, seen = [Transfer(str(index), 0, memoryview(bytearray(size))) for index, size in enumerate(sizes)], []
    while left:
        chunk = first_chunk(left, max_keys, max_bytes)
        assert 1 <= len(chunk) <= max_keys
        limit = max_bytes + (max_bytes // 8 if len(chunk) == len(left) else 0)  # a small rest goes along
        assert len(chunk) == 1 or sum(len(transfer.view) for transfer in chunk) <= limit
        fits = sum(len(transfer.view) for transfer in left[: len(chunk) + 1]) <= max_bytes
        assert len(chunk) in (max_keys, len(left)) or not fits, "as many as may go together"
        seen += [transfer.key for transfer in chunk]
        left = left[len(chunk) :]
    assert seen == [str(index) for index in range(len(sizes))]
    assert not first_chunk([], max_keys, max_bytes)


@pytest.mark.parametrize(
    ("limit", "calls", "expected"),
    [
        (64, [(4, 0.1, True)], 16),
        (64, [(4, 0.1, True), (16, 0.1, True), (64, 0.1, True)], 64),
        (64, [(4, 0.1, True), (16, 0.1, True), (1, 0.3, True)], 4),
        (64, [(4, 0.1, True), (16, 0.1, True), (1, 0.1, False)], 4),
        (64, [(3, 0.1, True)], 4),
        (2, [(2, 0.1, True)], 2),
    ],
    ids=["grows", "up to the limit", "slow", "failed", "not full", "limit below the first size"],
)
def test_fast_full_calls_grow_up_to_the_limit_and_others_begin_anew(
    monkeypatch: pytest.MonkeyPatch, limit: int, calls: list[tuple[int, float, bool]], expected: int
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    size = CallSize(4, limit, 0.25)
    for keys_carried, seconds, succeeded in calls:
        size.begin()
        now[0] += seconds
        size.end(keys_carried, succeeded=succeeded)
    assert size.begin() == expected


def test_calls_are_small_while_one_hangs() -> None:
    size = CallSize(4, 64, 0.05)
    size.begin()
    size.end(4, succeeded=True)
    hung = threading.Thread(target=size.begin)
    hung.start()
    hung.join()
    assert size.begin() == 16
    size.end(16, succeeded=True)
    time.sleep(0.06)
    assert size.begin() == 4


def client_of(
    monkeypatch: pytest.MonkeyPatch, call: Callable[..., list[int]], **changes: Any
) -> tuple[StoreClient, Callable[[str, float], Ticket]]:
    """A client whose store calls are these, and how it puts."""
    monkeypatch.setattr(StoreConnection, "start", lambda self: True)
    monkeypatch.setattr(StoreConnection, "call", lambda self, kind, function: call(function))
    client = StoreClient(StoreSettings("m:1", **changes))
    client._connection.state = type(client.state).READY
    client.start()
    return client, lambda names, timeout: client.put([Transfer(name, 0, memoryview(bytearray(2 * END + 1))) for name in names], timeout)


def test_puts_behind_one_that_hangs_give_their_slots_back_when_there_is_no_room_or_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    hangs, go_on, store = threading.Event(), threading.Event(), Mock(put=lambda keys, *rest: [0] * len(keys))
    client, put = client_of(monkeypatch, lambda function: (hangs.set(), go_on.wait(9), function(store))[2], max_queued_puts=3)
    runs = put("a", 9)
    assert hangs.wait(9)
    head, tail = put("bc", 0.05), put("de", 9)
    assert (tail.done.result(0), tail.released.done()) == ([StoreOutcome.DROPPED] * 2, True)
    head.released.result(5)
    assert head.done.result(0) == [StoreOutcome.TIMEOUT] * 2
    large = put("fghi", 9)
    assert (client.stats()["queued_puts"], runs.released.done()) == (4, False)
    go_on.set()
    assert runs.done.result(9) + large.done.result(9) == [StoreOutcome.OK] * 5
    assert client.close()


def test_what_one_call_moved_is_told_while_the_next_one_carries_more(monkeypatch: pytest.MonkeyPatch) -> None:
    carried, told, go_on = SimpleQueue[int](), SimpleQueue[int](), SimpleQueue[None]()

    def moved(keys: list[str], *rest: Any) -> list[int]:
        carried.put(len(keys))
        go_on.get(timeout=9)
        return [0] * len(keys)

    _, put = client_of(monkeypatch, lambda function: function(Mock(put=moved)))
    ticket = put("abcdefghijklmnopqrstuvwx", 9)
    ticket.on_progress = lambda outcomes: told.put(len(outcomes))
    go_on.put(None)
    assert [carried.get(timeout=9), carried.get(timeout=9), told.get(timeout=9), ticket.done.done()] == [4, 16, 4, False]
    go_on.put(None)
    go_on.put(None)
    assert (ticket.done.result(9), carried.get(timeout=9)) == ([StoreOutcome.OK] * 24, 4)


def test_questions_that_come_while_one_is_asked_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, go_on = SimpleQueue[list[str]](), threading.Event()

    def exists(keys: list[str]) -> list[int]:
        asked.put(keys)
        go_on.wait(9)
        return [int(key != "c") for key in keys]

    client, _ = client_of(monkeypatch, lambda function: function(Mock(exists=exists)))
    answers = [client.exists(["a"], 9)]
    assert asked.get(timeout=9) == ["a"]
    answers += [client.exists(keys, 9) for keys in (["b", "c"], ["d"])]
    go_on.set()
    assert [list(answer.result(9)) for answer in answers] == [[True], [True, False], [True]]
    assert asked.get(timeout=9) == ["b", "c", "d"]


def test_of_a_call_that_hung_nothing_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    _, put = client_of(monkeypatch, lambda function: [0, -800], hung_call_seconds=0.0, quarantine_seconds=0.2)
    ticket = put("ab", 9)
    assert (ticket.done.result(9), ticket.released.done()) == ([StoreOutcome.TRANSFER] * 2, False)
    ticket.released.result(9)


def test_each_kind_is_said_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = [1000.0]
    warn = Seldom(logging.getLogger("epochkv_connector.test"), AGAIN_SECONDS, lambda: now[0])

    def say(kind: str) -> list[str]:
        caplog.clear()
        warn(kind, logging.WARNING, "loads failed: %s", kind)
        return [record.getMessage() for record in caplog.records]

    assert say("gone") == ["loads failed: gone"]
    assert say("late") == ["loads failed: late"]
    now[0] += AGAIN_SECONDS - 1
    assert say("gone") == say("gone") == []
    now[0] += 1
    assert say("gone") == ["loads failed: gone (2 more were not logged)"]
    assert say("gone") == []
    warn.forget()
    assert say("gone") == ["loads failed: gone (1 more were not logged)"]


def test_who_closes_while_memory_is_being_registered_must_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, registered = threading.Event(), threading.Event()
    monkeypatch.setattr("epochkv_connector.store.connection.probe_master", lambda *args: "127.0.0.1")
    monkeypatch.setattr("epochkv_connector.store.connection.MooncakeClient", lambda *args: begun.set() or (registered.wait(9) and Mock()))
    connection = StoreConnection(StoreSettings("127.0.0.1:1"), [], Counters(), Mock(), Mock())
    connection.start()
    assert begun.wait(9)
    connection.begin_close()
    assert not connection.finish_close(0.1)
    registered.set()
    assert connection.finish_close(9)


TAKES = r"it takes connections: is it a Mooncake master, of version \d\S+ as here\?"
RDMA: dict[str, Any] = {"protocol": "rdma", "device_name": "mlx5_1"}


@pytest.mark.parametrize(
    ("master", "hostname", "environ", "more", "expected"),
    [
        ("m:50051", "10.0.0.7", {}, {}, [TAKES]),
        ("m:50051", "fd00::7", {}, {}, ["peers are told fd00::7, and the master is reached from 10.0.0.7: ", "it takes connections"]),
        ("m:50051", "node-7", {}, {}, [TAKES]),
        ("etcd://e0:2379;e1:2379", "10.0.0.7", {}, {}, ["etcd takes connections: .* with --cluster_id=mooncake_cluster"]),
        ("etcd://e0:2379", "10.0.0.7", {"MC_STORE_CLUSTER_ID": "c7"}, {}, ["etcd takes connections: .* with --cluster_id=c7"]),
        ("m:50051", "10.0.0.7", {}, RDMA, [TAKES]),
        ("m:50051", "10.0.0.7", {}, {**RDMA, "device_name": "ib0"}, ["protocol is rdma, and this machine has mlx5_0, mlx5_1: set "]),
        ("m:50051", "10.0.0.7", {}, {"metadata_server": "http://meta/m"}, ["does the metadata server http://meta/m answer", TAKES]),
    ],
    ids=["master", "family", "name", "etcd", "cluster", "rdma", "another device", "metadata"],
)
def test_what_to_look_at_when_setup_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, master: str, hostname: str, environ: dict[str, str], more: Any, expected: list[str]
) -> None:
    for name in ("MC_STORE_CLUSTER_ID", "MC_MIN_RPC_PORT", "MC_MAX_RPC_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    for device in ("mlx5_0", "mlx5_1"):
        (tmp_path / device).touch()
    monkeypatch.setattr("epochkv_connector.store.connection._RDMA", tmp_path)
    found = why_setup_failed(StoreSettings(master_address=master, **more), hostname, "10.0.0.7").split("; ")
    assert len(found) == len(expected)
    for clause, pattern in zip(found, expected, strict=True):
        assert re.match(pattern, clause), clause
