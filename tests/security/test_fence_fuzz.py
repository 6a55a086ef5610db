"""Every decoder and both state machines take whatever a peer can make them decode."""

from __future__ import annotations

import os
from random import Random

import pytest

from epochkv_fence.protocol.messages import Message, decode
from tests.security import fuzz, generators


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
