"""What is put is what is got, and nothing else ever is."""

import secrets

import pytest

from epochkv_connector.naming.identity import object_key, older_pattern, other_weights_pattern, pool_prefix
from epochkv_connector.scheduler.role import StoreKeys
from epochkv_connector.store.connection import StoreOutcome
from hack.standalone.mooncake import Mooncake
from tests.store.conftest import ConnectTo
from tests.support.store import END_BYTES, NAMESPACE, Memory, RawClient, get, put


def unique_key(name: str = "block") -> str:
    return object_key(NAMESPACE, 0, 0, name.encode() + secrets.token_bytes(8))


@pytest.mark.parametrize("payload_bytes", [1, 4096, 300_001])
@pytest.mark.parametrize("verify_payload", [True, False])
def test_another_client_reads_exactly_what_was_put(shared: Mooncake, connect: ConnectTo, payload_bytes: int, verify_payload: bool) -> None:
    mine, theirs = Memory(9, payload_bytes), Memory(9, payload_bytes)
    writer = connect(shared.address, mine, verify_payload=verify_payload)
    reader = connect(shared.address, theirs, verify_payload=verify_payload)
    keys = [unique_key() for _ in range(9)]
    values = [mine.fill(slot, seed=slot) for slot in range(9)]

    assert put(writer, mine, keys) == [StoreOutcome.OK] * 9
    assert get(reader, theirs, keys) == [StoreOutcome.OK] * 9
    assert [bytes(theirs.payload(slot)) for slot in range(9)] == values
    assert set(keys) <= set(shared.keys())
    assert reader.stats()["get_bytes"] == 9 * (payload_bytes + 2 * END_BYTES)


def test_first_writer_wins_and_the_second_is_told_ok_unless_the_first_left_a_defect(shared: Mooncake, connect: ConnectTo) -> None:
    memory = Memory(2, 1000)
    client, raw = connect(shared.address, memory), RawClient(shared.address, 1 << 20)
    keys = [unique_key(), unique_key()]
    raw.put(keys[1], secrets.token_bytes(memory.object_bytes))
    raw.close()
    assert get(client, memory, keys[1:]) == [StoreOutcome.FOREIGN], "and it is leased"
    first = memory.fill(0, seed=1)
    assert put(client, memory, keys[:1]) == [StoreOutcome.OK]
    memory.fill(0, seed=2)
    second = memory.fill(1, seed=3)
    assert put(client, memory, keys) == [StoreOutcome.OK] * 2
    memory.clear()
    assert get(client, memory, keys) == [StoreOutcome.OK] * 2
    assert [bytes(memory.payload(slot)) for slot in range(2)] == [first, second]


def test_existence_is_answered_in_order_and_long_questions_are_split(shared: Mooncake, connect: ConnectTo) -> None:
    memory = Memory(3, 100)
    client = connect(shared.address, memory)
    lookup = connect(shared.address)  # a client without memory, as the scheduler role has
    there = [unique_key() for _ in range(3)]
    put(client, memory, there)
    question = [unique_key() for _ in range(2500)]
    for key, place in zip(there, (0, 1024, 2499), strict=True):
        question[place] = key
    before = lookup.stats().get("exists_calls", 0)

    answer = lookup.exists(question, timeout=5).result(10)

    assert [place for place, found in enumerate(answer) if found] == [0, 1024, 2499]
    assert lookup.stats()["exists_calls"] - before == 3


def test_a_missing_key_is_a_miss_and_stops_the_request(shared: Mooncake, connect: ConnectTo) -> None:
    memory = Memory(8, 100)
    client = connect(shared.address, memory, max_call_keys=2)
    keys = [unique_key() for _ in range(8)]
    put(client, memory, keys[:3])
    outcomes = get(client, memory, keys)
    assert outcomes[:4] == [StoreOutcome.OK, StoreOutcome.OK, StoreOutcome.OK, StoreOutcome.ABSENT]
    assert outcomes[4:] == [StoreOutcome.CANCELLED] * 4


def test_removal_takes_the_prefix_and_nothing_that_only_looks_like_it(shared: Mooncake, connect: ConnectTo) -> None:
    memory = Memory(1, 10)
    client = connect(shared.address, memory)
    pool = secrets.token_hex(4)
    fingerprint, other = secrets.token_hex(8), secrets.token_hex(8)

    weights, gone = secrets.token_bytes(16), secrets.token_bytes(16)

    def key(epoch: int, fp: str = fingerprint, owner: str = pool, held: bytes = weights) -> str:
        return object_key(f"{owner}/{fp}/e{epoch}/w{held.hex()[:16]}", 0, 0, b"x")

    keep = [key(30), key(13), key(3, owner="f" * 8), "prefix/" + key(3)]
    old = [key(13, held=gone), key(30, other, held=gone)]
    for name in [key(3), key(3, other), *old, *keep]:
        assert put(client, memory, [name]) == [StoreOutcome.OK]

    assert client.remove_matching(rf"^{pool}\/{fingerprint}\/e3\/") == 1
    assert client.remove_matching(older_pattern(pool, 4, fingerprint, None)) == 1  # the other fingerprint's
    assert client.remove_matching(other_weights_pattern(pool, [weights, secrets.token_bytes(16)], secrets.token_hex(8), None)) == 2
    left = set(shared.keys())
    assert set(keep) <= left
    assert left.isdisjoint({key(3), key(3, other), *old})


def test_a_reclaim_counts_keys_of_all_layouts_and_bytes_of_its_own(shared: Mooncake, connect: ConnectTo) -> None:
    memory = Memory(1, 10)
    client = connect(shared.address, memory)
    own, other, uid = secrets.token_hex(8), secrets.token_hex(8), secrets.token_hex(8)
    pool, kept = pool_prefix(uid), secrets.token_hex(8)
    blocks = [(group, bytes([block])) for group in (0, 1) for block in range(2 + group)]
    old = {object_key(f"{pool}/{own}/e{epoch}/w{kept}", group, 0, block) for epoch in (1, 9) for group, block in blocks}
    foreign = {object_key(f"{pool}/{other}/e{epoch}/w{kept}", 0, 0, b"x") for epoch in (0, 9)}
    current = {object_key(f"{pool}/{fp}/e10/w{kept}", 0, 0, b"x") for fp in (own, other)}
    for name in sorted(old | foreign | current):
        assert put(client, memory, [name]) == [StoreOutcome.OK]
    keys = StoreKeys(client, (1000, 3))
    assert keys.reclaim(uid, own, 10) == (4 + 6 + 2, 4 * 1000 + 6 * 3)
    assert current <= set(shared.keys())
    assert not (old | foreign) & set(shared.keys())
    late = object_key(f"{pool}/{own}/e3/w{kept}", 1, 0, b"late")  # a put that was under way during the sweep
    assert put(client, memory, [late]) == [StoreOutcome.OK]
    assert keys.reclaim(uid, own, 10) == (1, 3)
    assert keys.reclaim(uid, own, 10) == (0, 0)


# -- bytes that are not ours ------------------------------------------------------------------------------------------------
def test_an_object_of_another_layout_is_a_miss_that_is_counted_and_said_once(
    shared: Mooncake, connect: ConnectTo, caplog: pytest.LogCaptureFixture
) -> None:
    """Engines of one name whose KV tensors differ: equal sizes, sound checksums, other meaning."""
    memory = Memory(3, 5000)
    writer = connect(shared.address, memory, layout=b"w" * 16)
    reader = connect(shared.address, memory, layout=b"r" * 16)
    keys = [unique_key() for _ in range(3)]
    values = [memory.fill(slot, seed=slot) for slot in range(3)]
    assert put(writer, memory, keys) == [StoreOutcome.OK] * 3
    for key in keys:
        assert get(reader, memory, [key]) == [StoreOutcome.FOREIGN]
    assert reader.stats()["defect_layout"] == 3
    said = [record.getMessage() for record in caplog.records if "laid out otherwise" in record.getMessage()]
    assert len(said) == 1
    assert keys[0] in said[0]
    assert put(reader, memory, keys) == [StoreOutcome.OK] * 3, "which replaces nothing"
    memory.clear()
    assert get(writer, memory, keys) == [StoreOutcome.OK] * 3
    assert [bytes(memory.payload(slot)) for slot in range(3)] == values
