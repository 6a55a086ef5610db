"""Every decoder and both state machines take whatever a peer can make them decode."""

from __future__ import annotations

import os
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from epochkv_fence.hub import events as ev
from epochkv_fence.hub.machine import Hub
from epochkv_fence.net.keys import CredentialsError, check_key, generate_keypair
from epochkv_fence.protocol.agent import Agent, Received, Started
from epochkv_fence.protocol.authority import PoolRecord, Term
from epochkv_fence.protocol.messages import MAX_EPOCH, TAGS, VERSION_FRAME, Heartbeat, Message, WireError, decode, encode
from epochkv_fence.protocol.pool import PoolConfig
from tests.security import fuzz, generators

INSTANCE = b"B" * 16
FUZZ = settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=40),
    st.binary(max_size=40),
    st.sampled_from([INSTANCE, 0, 1, MAX_EPOCH, MAX_EPOCH + 1, "step-42", -1, 30.0]),
)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3))
FIELDS = (
    "instance",
    "seq",
    "epoch",
    "weights",
    "lease_seconds",
    "request",
    "label",
    "weights_note",
    "tiers_off",
    "tiers_note",
    "keep",
    "labels",
    "below",
    "removed",
    "first",
    "code",
    "text",
)
near_misses = st.fixed_dictionaries(
    {"type": st.sampled_from(TAGS)},
    optional={
        **dict.fromkeys(FIELDS, values),
        **{field: st.sampled_from([INSTANCE, 0, 1, 2, "step-42", 30.0, "size"]) for field in FIELDS[:6]},
    },
)


def refused_or_message(frames: list[bytes]) -> Message | None:
    try:
        return decode(frames)
    except WireError as error:
        if not 0 < len(error.text) <= 1024:
            raise AssertionError(f"a refusal that cannot be sent as an answer: {error.text!r}") from error
        return None


def taken(payload: bytes) -> Message | None:
    """What a receiver makes of it: a message or nothing; any other exception is the finding."""
    message = refused_or_message([VERSION_FRAME, payload])
    if message is None:
        return None
    assert decode(encode(message)) == message or "nan" in repr(message)
    return message


@FUZZ
@given(st.lists(st.binary(max_size=200), max_size=4))
def test_any_frames(frames: list[bytes]) -> None:
    refused_or_message(frames)


@FUZZ
@given(st.binary(max_size=400))
def test_any_payload(payload: bytes) -> None:
    taken(payload)


@FUZZ
@given(st.lists(near_misses, min_size=1, max_size=6))
def test_any_fields_reach_both_state_machines_or_none(bodies: list[dict[str, Any]]) -> None:
    hub = Hub(PoolConfig("u", "p", ()))
    hub.step(ev.Acquired(Term("h", 1), PoolRecord(1, 0, True)), 100.0)
    agent = Agent(INSTANCE)
    agent.step(Started(), 100.0)
    now = 100.0
    for number, body in enumerate(bodies):
        now += 0.1
        message = taken(msgspec.msgpack.encode(body))
        if message is None:
            continue
        hub.step(ev.Heard(b"p", message), now)
        hub.step(ev.RoundBegan(number), now)
        for action in hub.step(ev.RoundVerified(number), now):
            if isinstance(action, ev.Send):
                encode(action.message)
        hub.step(ev.Tick(), now)
        hub.snapshot(now)
        agent.step(Received(message), now)
        agent.deadline()


@FUZZ
@given(st.binary(min_size=1, max_size=60), st.integers(0, 10**6), st.integers(0, 255))
def test_a_flipped_byte(noise: bytes, where: int, value: int) -> None:
    frames = encode(
        Heartbeat(INSTANCE, 7, 3, 12.5, {"hits": 0.5}, engine="e", pod="p", rank=1, old_epoch_requests=2, fingerprint="f", weights=INSTANCE)
    )
    payload = bytearray(frames[1])
    payload[where % len(payload)] = value
    taken(bytes(payload))
    taken(bytes(payload) + noise)


@FUZZ
@given(st.text(max_size=60))
def test_any_key(text: str) -> None:
    try:
        check_key("k", text)
    except CredentialsError:
        return
    assert len(text) == 40


def test_a_real_key_passes() -> None:
    check_key("k", generate_keypair().public)


def test_an_input_depends_on_its_number_alone() -> None:
    """Not on those made before it: a document drawn into another document once changed all later ones."""
    before = repr(generators.EDGES)
    for number in range(20_000):
        generators.json_text(Random(f"0/documents/{number}"), "folder")
    assert repr(generators.EDGES) == before


def test_half_a_minute_of_the_fuzzer() -> None:
    """A slice of `make fuzz`, over real sockets too; another seed each time, which its output names."""
    said: list[str] = []
    inputs, crashes = fuzz.run(30.0, int.from_bytes(os.urandom(4), "big"), said.append)
    assert crashes == 0, "\n".join(said)
    assert inputs > 1_000


def test_the_fuzzer_notices_a_decoder_that_raises_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(frames: list[bytes]) -> Message:
        if frames and frames[-1][:1] == b"\xff":
            raise KeyError("x")
        return decode(frames)

    monkeypatch.setattr(fuzz, "decode", broken)
    said: list[str] = []
    assert fuzz.run(60.0, 1, said.append)[1] == 1
    assert "CRASH in" in said[-1]
    assert "KeyError" in said[-1]
