"""The wire: what goes in comes out, and everything else is named in an error."""

from typing import Any

import msgspec
import pytest

from epochkv_fence.protocol.messages import MAX_KEPT, MAX_MESSAGE_BYTES, TAGS, Heartbeat, Nudge, Reclaim, Refusal, WireError, decode, encode
from tests.security.fuzz import CORPUS

INSTANCE = bytes(range(16))
WEIGHTS = bytes(range(16, 32))


@pytest.mark.parametrize("message", CORPUS, ids=lambda message: type(message).__name__)
def test_round_trip(message: Any) -> None:
    assert decode(encode(message)) == message


def test_every_type_is_covered() -> None:
    assert {type(message).__name__ for message in CORPUS} == set(TAGS)


def test_the_bytes_on_the_wire_do_not_change_by_accident() -> None:
    version, payload = encode(Nudge(INSTANCE))
    assert version == b"\x02"
    assert msgspec.msgpack.decode(payload) == {"type": "Nudge", "instance": INSTANCE}


def test_a_field_of_a_newer_peer_is_ignored() -> None:
    payload = msgspec.msgpack.encode({"type": "Nudge", "instance": INSTANCE, "why": "new"})
    assert decode([b"\x02", payload]) == Nudge(INSTANCE)


def test_as_many_weights_as_may_be_kept_fit() -> None:
    assert sum(map(len, encode(Reclaim(INSTANCE, 1, [WEIGHTS] * MAX_KEPT)))) <= MAX_MESSAGE_BYTES


def test_what_one_engine_counts_leaves_room_for_the_sum_of_many() -> None:
    most = 2**31 - 1
    beat = decode([b"\x02", of("Heartbeat", instance=INSTANCE, seq=0, old_epoch_requests=most)])
    assert isinstance(beat, Heartbeat)
    assert beat.old_epoch_requests == most
    with pytest.raises(WireError, match="old_epoch_requests"):
        decode([b"\x02", of("Heartbeat", instance=INSTANCE, seq=0, old_epoch_requests=most + 1)])


def of(tag: str, **fields: object) -> bytes:
    return msgspec.msgpack.encode({"type": tag, **fields})


@pytest.mark.parametrize(
    ("frames", "code", "named"),
    [
        ([], Refusal.FRAMES, "0 frames"),
        ([b"\x02", b"", b""], Refusal.FRAMES, "3 frames"),
        ([b"\x01", encode(Nudge(INSTANCE))[1]], Refusal.VERSION, "tag 'Nudge' has version 1; this side speaks version 2"),
        ([b"", encode(Nudge(INSTANCE))[1]], Refusal.VERSION, "(empty)"),
        ([b"\x02", msgspec.msgpack.encode({"type": "Wipe"})], Refusal.TAG, "unknown tag 'Wipe' in version 2"),
        ([b"\x02", b"\xc1\xff"], Refusal.MALFORMED, "tag (none)"),
        ([b"\x02", encode(Nudge(INSTANCE))[1][:-1]], Refusal.MALFORMED, "version 2"),
        ([b"\x02", msgspec.msgpack.encode({"type": "Nudge", "instance": b"short"})], Refusal.MALFORMED, "tag 'Nudge'"),
        ([b"\x02", of("Heartbeat", instance=INSTANCE, seq=0, stats={f"s{n}": 0.0 for n in range(65)})], Refusal.MALFORMED, "stats"),
        ([b"\x02", of("Heartbeat", instance=INSTANCE, seq=0, instance_age_seconds=float("nan"))], Refusal.MALFORMED, "age_seconds"),
        ([b"\x02", of("Heartbeat", instance=INSTANCE, seq=0, weights=b"short")], Refusal.MALFORMED, "weights"),
        ([b"\x02", of("Heartbeat", instance=INSTANCE, seq=0, weights_note="n" * 1025)], Refusal.MALFORMED, "weights_note"),
        ([b"\x02", of("Label", request=1, weights=WEIGHTS, label="")], Refusal.MALFORMED, "label"),
        ([b"\x02", of("Label", request=1, weights=WEIGHTS, label="v\n")], Refusal.MALFORMED, r"label is 'v\n'; give one line"),
        ([b"\x02", of("Heartbeat", instance=INSTANCE, seq=0, pod="\x1b")], Refusal.MALFORMED, r"pod is '\x1b'; give one line"),
        ([b"\x02", of("Heartbeat", instance=INSTANCE, seq=0, versions={"vllm": "1\n"})], Refusal.MALFORMED, "not printable"),
        ([b"\x02", of("Reclaim", instance=INSTANCE, below=1, keep=[WEIGHTS] * (MAX_KEPT + 1))], Refusal.MALFORMED, "keep"),
        ([b"\x02", of("Status", request=1, labels={f"{n:032x}": "v" for n in range(17)})], Refusal.MALFORMED, "labels"),
        ([b"\x02", of("Propose", instance=INSTANCE, epoch=2**53)], Refusal.MALFORMED, "epoch"),
        ([b"\x02", of("Bump", request=2**63, epoch=1)], Refusal.MALFORMED, "request"),
        ([b"\x02", of("Heartbeat", instance=INSTANCE, seq=0, instance_age_seconds=1.1e9)], Refusal.MALFORMED, "instance_age_seconds"),
        ([b"\x02", of("Grant", instance=INSTANCE, seq=0, epoch=1, lease_seconds=0.0)], Refusal.MALFORMED, "lease_seconds"),
        ([b"\x02", of("Grant", instance=INSTANCE, seq=0, epoch=1, lease_seconds=86_401.0)], Refusal.MALFORMED, "lease_seconds"),
        ([b"\x02", of("Heartbeat", instance=INSTANCE, seq=0, stats={"s" * 65: 0.0})], Refusal.MALFORMED, "stats"),
        ([b"\x02", of("Heartbeat", instance=INSTANCE, seq=0, versions={f"p{n}": "1" for n in range(9)})], Refusal.MALFORMED, "versions"),
        ([b"\x02", of("Status", request=1, labels={"0" * 31: "v"})], Refusal.MALFORMED, "labels"),
        ([b"\x02", of("Status", request=1, engines=[{"instance": INSTANCE}] * 65)], Refusal.MALFORMED, "engines"),
        ([b"\x02", of("Error", code="new", text="")], Refusal.MALFORMED, "code"),
        ([b"\x02", b"\x93" * 40_000], Refusal.MALFORMED, "version 2"),
        ([b"\x02", b"x" * (MAX_MESSAGE_BYTES + 1)], Refusal.SIZE, "at most 65536"),
    ],
)
def test_refused(frames: list[bytes], code: Refusal, named: str) -> None:
    with pytest.raises(WireError) as refused:
        decode(frames)
    assert refused.value.code is code
    assert named in refused.value.text


def test_what_the_other_side_would_refuse_is_not_sent() -> None:
    with pytest.raises(WireError, match="Heartbeat has"):
        encode(Heartbeat(INSTANCE, 0, stats={f"{'x' * 240}{n:03}": 0.0 for n in range(300)}))
