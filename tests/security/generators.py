"""Inputs for the fuzzer: messages that are almost right, bytes that are not, and documents in between.

Drawn from a `random.Random`, so that a seed and a number give an input again. Hypothesis shrinks better and is used by the
tests next to this; for ten minutes of inputs it is a hundred times too slow.
"""

from random import Random
from typing import Any

import msgspec

from epochkv_fence.protocol.messages import (
    MAX_EPOCH,
    MAX_KEPT,
    TAGS,
    VERSION_FRAME,
    Bump,
    BumpStatus,
    EngineStatus,
    Error,
    Grant,
    Heartbeat,
    Label,
    Labelled,
    Leave,
    Message,
    Nudge,
    Propose,
    Reclaim,
    Reclaimed,
    Refusal,
    Source,
    Status,
    encode,
)

INSTANCES = [bytes([65 + n]) * 16 for n in range(4)]
WEIGHTS = [bytes([97 + n]) * 16 for n in range(4)]
CORPUS: list[Message] = [
    Heartbeat(
        INSTANCES[0], 7, 3, 12.5, {"hits": 0.5, "l1_bytes": 1e9}, engine="engine", pod="pod-0", fingerprint="f" * 64, weights=WEIGHTS[0]
    ),
    Heartbeat(INSTANCES[1], 0),
    Heartbeat(INSTANCES[0], 8, 3, weights=WEIGHTS[1]),
    Heartbeat(INSTANCES[2], 9, 3, weights_note="rank 1: no answer"),
    Heartbeat(INSTANCES[3], 9, 3, tiers_off="SavesOnly", tiers_note="loads are off: because"),
    Heartbeat(INSTANCES[3], 10, 3, versions={"epochkv": "0.2.0", "vllm": "0.32.0"}, rank=1, old_epoch_requests=2, isolated=True),
    Grant(INSTANCES[0], 7, 4, 30.0),
    Nudge(INSTANCES[0]),
    Propose(INSTANCES[1], 5),
    Bump(1, 4),
    Bump(2, 5),
    BumpStatus(1, 4, 4, 3, 2, 1, 0, 30.0),
    Status(3),
    Status(4, after=INSTANCES[0]),
    Status(
        *(3, 4, 4, 1, [EngineStatus(INSTANCES[0], 4, 12.5, 0.25, 7.5, engine="engine", pod="pod-0", weights=WEIGHTS[0])], 30.0),
        *(Source.TRAINER, "uid-1", INSTANCES[0], {"61" * 16: "step-42"}),
    ),
    Label(5, WEIGHTS[0], "step-42"),
    Labelled(5, WEIGHTS[0], "step-42"),
    Reclaim(INSTANCES[0], 4),
    Reclaim(INSTANCES[0], 4, WEIGHTS[:2]),
    Reclaim(INSTANCES[0], 4, WEIGHTS[:2], 7),
    Reclaimed(INSTANCES[0], 4, 12, 4096, 7),
    Leave(INSTANCES[0]),
    Error(Refusal.TAG, "unknown tag"),
]
EDGES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 4, 5, 2**31, 2**53, MAX_EPOCH, MAX_EPOCH + 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63),
    0.0, -0.0, 1e-300, 0.1, 30.0, 1e9, 1e15, 1.7e308, float("inf"), float("-inf"), float("nan"),
    "", "Spec", "size", "step-42", "61" * 16, "\0", "é" * 100, "x" * 253, "x" * 254, "x" * 2000, b"", *INSTANCES, *WEIGHTS,
    b"z" * 15,
    b"z" * 17, [], {}, [INSTANCES[0]], [WEIGHTS[0]] * MAX_KEPT, [WEIGHTS[0]] * (MAX_KEPT + 1), {"a": 1.0},
    {"x" * 65: 1.0}, {"61" * 16: "x"},
]  # fmt: skip


def value(rng: Random, depth: int = 0) -> Any:
    """Anything that msgpack carries."""
    kind = rng.random()
    if depth < 3 and kind < 0.12:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    if depth < 3 and kind < 0.2:
        return {rng.choice(["instance", "epoch", "type", "", "x"]): value(rng, depth + 1) for _ in range(rng.randrange(4))}
    if kind < 0.3:
        return rng.randbytes(rng.choice([0, 1, 8, 16, 16, 40]))
    if kind < 0.4:
        return rng.randrange(-10, 20)
    return rng.choice(EDGES)


def body(rng: Random) -> dict[str, Any]:
    """A message's fields, some of them replaced, taken away or made up."""
    fields: dict[str, Any] = msgspec.msgpack.decode(encode(rng.choice(CORPUS))[1])
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        name = rng.choice(list(fields) or ["type"])
        match rng.randrange(6):
            case 0:
                fields.pop(name, None)
            case 1:
                others = "extra", "weights", "weights_note", "tiers_off", "tiers_note", "keep", "labels", "first", ""
                fields[rng.choice(others)] = value(rng)
            case 2:
                fields["type"] = rng.choice([*TAGS, "Wipe", "", 3, None])
            case _:
                fields[name] = value(rng)
    return fields


def payload(rng: Random) -> bytes:
    """An encoded message, perhaps with bytes changed, or bytes alone."""
    if rng.random() < 0.1:
        return rng.randbytes(rng.randrange(120))
    try:
        data = bytearray(msgspec.msgpack.encode(body(rng)))
    except (OverflowError, RecursionError):
        return b""
    if rng.random() < 0.4 and data:
        for _ in range(rng.choice([1, 1, 2, 8])):
            where = rng.randrange(len(data))
            match rng.randrange(4):
                case 0:
                    data[where] ^= 1 << rng.randrange(8)
                case 1:
                    data[where] = rng.choice([0x00, 0x7F, 0x80, 0xC0, 0xC1, 0xC6, 0xDB, 0xDD, 0xDF, 0xFF])
                case 2:
                    data[where:] = b""
                case _:
                    data[where:where] = rng.randbytes(rng.randrange(1, 9))
            if not data:
                break
    return bytes(data)


def frames(rng: Random) -> list[bytes]:
    """What arrives on a socket: mostly a version and a payload."""
    kind = rng.random()
    if kind < 0.85:
        return [VERSION_FRAME, payload(rng)]
    if kind < 0.93:
        return [rng.choice([b"", b"\x00", b"\x01", b"\x02\x02", b"\xff" * 20]), payload(rng)]
    return [rng.randbytes(rng.randrange(20)) for _ in range(rng.choice([1, 1, 3, 4, 30]))]
