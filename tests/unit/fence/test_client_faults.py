"""The client against what answers and is no hub of ours, against a hub that was deposed in its sleep, and against large pools."""

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest
import zmq

from epochkv_fence.client import HubUnreachable, Pool, ResetNotRecorded
from epochkv_fence.connection import CLIENT_PUBLIC_ENV, CLIENT_SECRET_ENV, HUB_PUBLIC_ENV, Connection
from epochkv_fence.net.keys import ClientKeys, generate_keypair
from epochkv_fence.protocol.messages import (
    Bump,
    BumpStatus,
    EngineStatus,
    Error,
    Grant,
    Heartbeat,
    Label,
    Labelled,
    Refusal,
    Status,
    decode,
    encode,
)
from hack.waiting import eventually
from tests.support.fence import NEW, OTHER, POOL, FenceWorld
from tests.support.hub import Switch

Question = Status | Bump | Label
Report = Callable[[list[bytes]], object]


def connection(endpoint: str, uid: str, keys: ClientKeys) -> Connection:
    variables = {HUB_PUBLIC_ENV: keys.hub_public, CLIENT_PUBLIC_ENV: keys.public, CLIENT_SECRET_ENV: keys.secret}
    return Connection.load({"pool": {"name": "p", "uid": uid}, "hub": {"endpoint": endpoint}}, variables)


@contextmanager
def false_hub(answer: Callable[[Question, Report], None]) -> Iterator[Connection]:
    """A ROUTER with CURVE that any key may reach; `answer` gets each question and a way to send frames back."""
    hub, client = generate_keypair(), generate_keypair()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.curve_server = 1
    router.curve_publickey, router.curve_secretkey = hub.public.encode(), hub.secret.encode()
    port = router.bind_to_random_port("tcp://127.0.0.1")
    stopping = threading.Event()

    def serve() -> None:
        while not stopping.is_set():
            if not router.poll(50):
                continue
            peer, *frames = router.recv_multipart()
            message = decode(frames)
            assert isinstance(message, Question)
            answer(message, lambda frames, peer=peer: router.send_multipart([peer, *frames]))  # type: ignore[misc]
        router.close(linger=0)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield connection(f"tcp://127.0.0.1:{port}", "u", ClientKeys(hub.public, *client))
    finally:
        stopping.set()
        thread.join(10)
        context.destroy(linger=0)


def honest(message: Question, say: Report) -> None:
    """What a hub says that publishes at once, of a pool with one engine."""
    match message:
        case Status(request, after=after):
            engines = [EngineStatus(b"e" * 16, 0, engine="a", weights=NEW)] if after is None else []
            say(encode(Status(request, total=1, engines=engines, lease_seconds=30.0, pool="u", after=after)))
        case Bump(request, epoch):
            say(encode(BumpStatus(request, epoch, epoch, epoch)))
        case Label(request, weights, label):
            say(encode(Labelled(request, weights, label)))


GARBAGE: list[list[bytes]] = [
    [b""],
    [b"\x02"],
    [b"\x02", b""],
    [b"\x02", b"\xff" * 1000],
    [b"\x01", b"\x80"],
    [b"\x02", b"\x81\xa4type\xa5Other"],
    [b"\x02", b"\x81\xa4type\xaaBumpStatus"],
    [b"\x02", b"x" * 70_000],
    [b"a", b"b", b"c"],
    encode(Grant(b"b" * 16, 1, 5, 30.0)),
    encode(Heartbeat(b"b" * 16, 1)),
    encode(Error(Refusal.LIMIT, "slow down")),
    encode(Status(424242, 99, 99, lease_seconds=30.0)),
    encode(BumpStatus(424242, 1, 99, 99)),
    encode(Labelled(424242, NEW, "step-1")),
]


def test_garbage_strangers_and_duplicates_between_true_answers_change_nothing() -> None:
    def answer(message: Question, say: Report) -> None:
        for frames in GARBAGE:
            say(frames)
        request = message.request  # of the wrong kind, about another epoch, page, weights or label, and no hub's answer at all
        if not isinstance(message, Status):
            say(encode(Status(request, 99, 99, lease_seconds=30.0)))
        if not isinstance(message, Bump):
            say(encode(BumpStatus(request, 1, 99, 99)))
        if not isinstance(message, Label):
            say(encode(Labelled(request, NEW, "step-1")))
        say(encode(BumpStatus(request, 8, 99, 99)))
        say(encode(Status(request, 99, 99, lease_seconds=30.0, after=b"z" * 16)))
        say(encode(Status(request, 99, 99)))
        say(encode(Labelled(request, OTHER, "step-1")))
        say(encode(Labelled(request, NEW, "step-2")))
        for _ in range(3):
            honest(message, say)

    with false_hub(answer) as way, Pool.connect(way, 20) as pool:
        reset = pool.reset()
        assert (reset.epoch, reset.published) == (1, True)
        assert [(group.id, group.label) for group in pool.wait_weights(label="step-1").groups] == [(NEW.hex(), "step-1")]
        counters = pool._session.counters
        assert counters["wire_errors"] >= 8
        assert counters["late"] >= 1
        assert counters["unexpected"] >= 2


def test_a_hub_that_falls_silent_after_the_first_answer() -> None:
    asked: list[Bump] = []

    def answer(message: Question, say: Report) -> None:
        if isinstance(message, Bump):
            asked.append(message)
        else:
            honest(message, say)

    with false_hub(answer) as way, Pool.connect(way, 20) as pool:
        with pytest.raises(ResetNotRecorded, match=r"no hub is known to have recorded epoch 1 within 1\.5 s"):
            pool.reset(timeout_s=1.5)
        assert len(asked) >= 3  # it was repeated
        assert len({bump.request for bump in asked}) == 1


def test_a_label_that_nobody_notes() -> None:
    asked: list[Label] = []

    def answer(message: Question, say: Report) -> None:
        if isinstance(message, Label):
            asked.append(message)
            for answer in (Labelled(message.request, OTHER, "step-1"), Labelled(message.request, NEW, "step-2")):
                say(encode(answer))
            say(encode(BumpStatus(message.request, 1, 99, 99)))
        else:
            honest(message, say)

    said = r"no answer from the hub at .*\. all engines hold weights 3f2a9c1e, and that they are called 'step-1' is not known to be noted$"
    with false_hub(answer) as way, Pool.connect(way, 20) as pool:
        with pytest.raises(HubUnreachable, match=said):
            pool.wait_weights(label="step-1", timeout_s=0.5)
        assert len(asked) >= 3  # it was repeated
        assert {(label.weights, label.label) for label in asked} == {(NEW, "step-1")}
        assert len({label.request for label in asked}) == 1


def test_a_hub_deposed_in_its_sleep_cannot_answer_for_the_pool() -> None:
    """While one hub sleeps another one raises the pool. The sleeper, awake, still thinks that epoch 1 would be new; if the
    client believed it, its reset would be a no-op that looks done."""
    old = FenceWorld(lease_seconds=1.0)
    new = FenceWorld(lease_seconds=1.0)
    new.authority, new.hub_pair, new.pool_pair, new.config = old.authority, old.hub_pair, old.pool_pair, old.config
    with closing(old), closing(new):
        first = old.hub()
        old.lead(first)
        way = closing(Switch(int(first.endpoint.rpartition(":")[2])))
        with way as switch, Pool.connect(connection(switch.endpoint, POOL, old.client_keys), 20) as pool:
            thaw = old.thread.freeze()
            second = new.hub()
            new._terms = old._terms
            new.lead(second)
            new.request(second, 3)
            eventually(lambda: new.published() == 3, "the other hub raises the pool")
            results: list[object] = []
            thread = threading.Thread(target=lambda: results.append(pool.reset(timeout_s=60)))
            thread.start()
            sent = pool._session.counters["sent"]
            eventually(lambda: pool._session.counters["sent"] > sent, "it asks the sleeper")
            thaw.set()
            eventually(lambda: not first.leading, "the sleeper steps down")
            assert not results
            switch.turn(int(second.endpoint.rpartition(":")[2]))
            thread.join(60)
            assert results[0].epoch == 4  # type: ignore[attr-defined]
            assert new.published() == 4
