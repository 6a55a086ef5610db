"""The decoder and both state machines take whatever a peer can make them decode."""

import os

from tests.security import fuzz


def test_some_seconds_of_the_fuzzer() -> None:
    """A slice of `make fuzz`, over real sockets too; another seed each time, which its output names."""
    said: list[str] = []
    inputs, crashes = fuzz.run(15.0, int.from_bytes(os.urandom(4), "big"), said.append)
    assert crashes == 0, "\n".join(said)
    assert inputs > 1_000
