"""The client of trainers against real hubs and agents: what a reset means, and that no fault makes it mean less; what it refuses, and
what it reads of stamps."""

import asyncio
import math
import os
import pickle
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

import epochkv_fence.client as fence
from epochkv_fence.client.session import Session
from epochkv_fence.common import lease_clock
from epochkv_fence.connection import CLIENT_PUBLIC_ENV, CLIENT_SECRET_ENV, HUB_PUBLIC_ENV, Connection
from epochkv_fence.net.dealer import Link
from epochkv_fence.net.keys import ClientKeys, generate_keypair
from epochkv_fence.net.server import HubServer
from epochkv_fence.protocol import messages as ms
from hack.waiting import eventually
from tests.security.wire import FakeHub
from tests.support.cli import inside
from tests.support.fence import NEW, OTHER, POOL, SECOND_POOL, FenceWorld, MemoryAuthority
from tests.support.hub import HubProcess, HubWorld, Switch, hub_world, together, using


def client_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "epochkv-client"]


def test_a_reset_returns_when_every_engine_has_moved(world: HubWorld) -> None:
    agents = world.serving(2)
    agents[0][1].num_old_epoch = 3
    pool = world.connect()
    reset = pool.reset()
    assert (reset.epoch, reset.published, reset.engines, reset.laggards) == (1, True, 2, ())
    assert (reset.noop, reset.old_epoch_requests) == (False, 3)
    assert all(agent.view.epoch == 1 for agent, _ in agents)
    snapshot = world.snapshot()
    assert (snapshot.target, snapshot.published) == (1, 1)
    assert snapshot.origin is not None
    assert snapshot.origin.value == "Trainer"
    eventually(lambda: all(using(agent, 1) for agent, _ in agents), "everyone shares again")


def test_the_next_epoch_and_a_named_one(world: HubWorld) -> None:
    world.serving(1)
    pool = world.connect()
    assert [pool.reset().epoch for _ in range(3)] == [1, 2, 3]
    skipped = pool.reset(epoch=10)
    assert (skipped.epoch, skipped.published, skipped.noop) == (10, True, False)
    again = pool.reset(epoch=10)
    assert (again.epoch, again.published, again.noop) == (10, True, True)
    lower = pool.reset(epoch=4)
    assert (lower.epoch, lower.published, lower.noop) == (4, True, True)
    assert world.snapshot().target == 10
    assert pool.reset().epoch == 11


def test_who_fell_silent_is_named_although_the_hub_lists_it_no_more(tmp_path: Path) -> None:
    with hub_world(tmp_path / "state", lease_seconds=4.0) as world, Switch(world.port) as switch:
        agents = [world.agents.start("here")[0], world.agents.start("cut-off", endpoint=switch.endpoint)[0]]
        eventually(lambda: all(using(agent, 0) for agent in agents))
        switch.turn(None)
        pool = world.connect()
        reset = pool.reset(wait=False)
        assert (reset.epoch, reset.published) == (1, False)
        assert world.snapshot().target == 1, "it has returned when the epoch was recorded"
        done = pool.wait(1, timeout_s=30)
        assert [view.engine for view in world.snapshot().engines if view.alive] == ["here"]
        assert (done.epoch, done.published, done.laggards, done.noop) == (1, True, ("cut-off",), False)
        again = pool.wait(1, timeout_s=30)
        assert (again.published, again.laggards, again.noop) == (True, (), True)
        with pytest.raises(fence.ResetTimeout, match="nobody has asked for it") as caught:
            pool.wait(7, timeout_s=1.0)
        assert (caught.value.reset.engines, caught.value.reset.published, caught.value.reset.laggards) == (1, False, ())


def test_an_engine_that_never_acknowledges_is_named_and_fenced_by_its_lease(tmp_path: Path) -> None:
    with hub_world(tmp_path / "state", lease_seconds=2.0) as world:
        agents = world.serving(2)
        agents[0][1].is_busy = True
        pool = world.connect()
        reset = pool.reset(timeout_s=0.5)
        assert (reset.epoch, reset.published, reset.laggards) == (1, False, ("engine-0",))
        with pytest.raises(
            fence.ResetTimeout, match=r"epoch 1 is recorded and not published .* not yet acknowledged by: engine-0"
        ) as caught:
            pool.reset(epoch=1, timeout_s=0.3, on_failure="crash")
        assert pickle.loads(pickle.dumps(caught.value)).reset == caught.value.reset  # from another process
        assert caught.value.reset.laggards == ("engine-0",)
        done = pool.reset(epoch=1, timeout_s=30)
        assert done.published
        assert done.laggards == ("engine-0",)  # it still has not: its lease was waited for
        assert lease_clock() >= agents[0][0].view.lease_until or agents[0][0].view.epoch == 1


def test_resets_of_many_threads_are_all_newer_than_their_calls(world: HubWorld) -> None:
    """Several that call at once may share an epoch: none of them has KV of before its call."""
    world.serving(2)
    pools = [world.connect() for _ in range(3)]

    def above(pool: fence.Pool) -> bool:
        before = world.snapshot().target
        reset = pool.reset()
        return reset.published and not reset.noop and reset.epoch > before

    assert all(together([lambda number=number: above(pools[number % 3]) for number in range(9)]))
    snapshot = world.snapshot()
    assert 1 <= snapshot.target == snapshot.published <= 9


def test_a_fork_is_refused_cleanly_and_connects_anew(world: HubWorld) -> None:
    pool = world.connect()
    assert pool.reset().epoch == 1
    child = os.fork()
    if child == 0:
        status = 1
        try:
            try:
                pool.reset()
            except fence.PoolClosed:
                pool.close()
                with fence.Pool.connect(world.folder) as own:
                    status = 0 if own.reset().published else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pool.reset().epoch == 3  # the parent's own connection is untouched


def test_close_ends_the_thread_and_later_calls_say_so(world: HubWorld) -> None:
    before = len(client_threads())
    pool = fence.Pool.connect(world.folder)
    assert len(client_threads()) == before + 1
    pool.close()
    pool.close()
    assert len(client_threads()) == before
    with pytest.raises(fence.PoolClosed, match="connect again"):
        pool.reset()
    forgotten = fence.Pool.connect(world.folder)
    assert len(client_threads()) == before + 1
    del forgotten
    eventually(lambda: len(client_threads()) == before, "a pool that is dropped ends its thread")


def test_close_while_others_wait_ends_them(world: HubWorld) -> None:
    ((_, engine),) = world.serving(1)
    engine.is_busy = True
    pool = fence.Pool.connect(world.folder)
    with ThreadPoolExecutor() as threads:
        call = threads.submit(pool.reset, timeout_s=60)
        eventually(lambda: world.snapshot().target == 1)
        pool.close()
        with pytest.raises(fence.PoolClosed):
            call.result(20)


def test_an_epoch_that_can_only_be_a_slip_is_refused_unless_forced(world: HubWorld, capsys: pytest.CaptureFixture[str]) -> None:
    pool = world.connect()
    assert pool.reset(epoch=1_000_000).published
    with pytest.raises(fence.ArgumentError, match=r"epoch is 2000001, and the pool's target is 1000000; a target never goes down again"):
        pool.reset(epoch=2_000_001)
    config = ("--config", str(world.folder), "--timeout", "20")
    for given, limit in ((["999999999999"], "1000000 needs force"), (["99999999999999", "--force"], "10000000000000 is refused")):
        code, _, errors = inside(capsys, "reset", *config, "--epoch", *given)
        named = errors.startswith(f"epochkv: --epoch is {given[0]}, and the pool's target is 1000000")
        assert (code, named, limit in errors) == (2, True, True)
    assert world.snapshot().target == 1_000_000
    assert (pool.reset(epoch=2_000_000).epoch, pool.reset(epoch=5).noop) == (2_000_000, True), "below the target, however far"
    assert inside(capsys, "reset", *config, "--epoch", "4000000", "--force")[0] == 0
    assert pool.reset(epoch=9_000_000, force=True).epoch == 9_000_000


def test_a_key_that_is_refused_and_a_hub_that_is_another(world: HubWorld, tmp_path: Path) -> None:
    with hub_world(tmp_path / "other") as other:
        mixed = tmp_path / "mixed"

        def take(**files: Path) -> Path:
            mixed.mkdir(exist_ok=True)
            for name in ("connection.json", "hub.pub", "client.pub", "client.key"):
                folder = files.get(name.split(".")[0], world.folder)
                (mixed / name).write_bytes((folder / name).read_bytes())
            return mixed

        started, before = time.monotonic(), len(client_threads())
        refusal = r"it rejects our key, which is not authorized for any pool of this hub, or was retired: take the files of"
        with pytest.raises(fence.KeyRefused, match=refusal):
            fence.Pool.connect(take(client=other.folder), timeout_s=60)
        assert time.monotonic() - started < 30  # a wrong key is not waited for
        started = time.monotonic()
        with pytest.raises(fence.KeyRefused, match=r"hub\.pub is not the key of that hub, what listens there is no hub, or it hangs$"):
            fence.Pool.connect(take(hub=other.folder), timeout_s=6)
        assert time.monotonic() - started >= 6  # it is waited for: one that hangs may go on
        eventually(lambda: len(client_threads()) == before, "their threads end")


def test_a_look_up_of_a_name_that_hangs_holds_no_call_up(monkeypatch: pytest.MonkeyPatch) -> None:
    over, waited = threading.Event(), list[bool]()
    monkeypatch.setattr(zmq.Context, "term", lambda _: waited.append(over.wait(20)))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: over.wait(20))
    way = connection("tcp://hub.invalid:7700", "u", ClientKeys(generate_keypair().public, *generate_keypair()))
    with pytest.raises(fence.HubUnreachable, match=r"the name hub\.invalid was not resolved within 1 s"):
        asyncio.run(fence.AsyncPool.connect(way, timeout_s=0.2))
    assert not waited
    over.set()


def test_keys_on_a_disk_that_hangs_hold_no_call_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epochkv_fence.client.pool.GRACE_SECONDS", 0.1)
    monkeypatch.setattr(Connection, "client_keys", lambda _: time.sleep(3))
    way = connection("tcp://h:7700", "u", ClientKeys(generate_keypair().public, *generate_keypair()))
    with pytest.raises(fence.HubUnreachable, match=r"the client's own thread has not answered for 0\.3 s"):
        asyncio.run(fence.AsyncPool.connect(way, timeout_s=0.2))


def test_refusals_that_are_repeated_do_not_put_the_redial_off(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ClientKeys(generate_keypair().public, *generate_keypair())
    with closing(FakeHub(generate_keypair())) as other, zmq.Context() as context:
        link, due = Link(context, other.endpoint, keys), set[float]()
        for _ in range(3):
            eventually(lambda: link.events() and not due.add(link.redial_at), "the handshake fails")
        refusal = ms.encode(ms.Error(ms.Refusal.POOL, "not any more"))
        monkeypatch.setattr(link, "receive", lambda: setattr(link, "redial_at", math.inf) or refusal)
        Session(connection(other.endpoint, "u", keys))._receive(link)
        assert due == {link.redial_at}
        link.close()


def test_nothing_is_asked_of_a_new_pool_whose_keys_lie_where_the_old_ones_did() -> None:
    with closing(FenceWorld()) as world, ThreadPoolExecutor() as threads:
        hub = world.hub()
        agent, engine = world.agent(hub.endpoint)
        eventually(lambda: agent.view.epoch == 0)
        engine.is_busy = True
        way = connection(hub.endpoint, POOL, world.client_keys)
        with fence.Pool.connect(way, 20) as pool:
            call = threads.submit(pool.reset, timeout_s=60)
            eventually(lambda: world.authority.records[POOL].target == 1)
            new = world.second_pool(hub)
            way.environ.update({CLIENT_PUBLIC_ENV: new.public, CLIENT_SECRET_ENV: new.secret})  # type: ignore[attr-defined]
            world.thread.call(lambda: hub.remove_pool(POOL))
            with pytest.raises(fence.WrongPool, match=f"the key speaks for the pool with uid {SECOND_POOL}, and .* with uid {POOL};"):
                call.result()
        assert world.thread.call(lambda: hub.snapshot(SECOND_POOL)).target == 0


def test_a_client_whose_folder_is_gone_joins_a_hub_again_that_refused_it_while_it_started(tmp_path: Path) -> None:
    with hub_world(tmp_path / "state") as world, fence.Pool.connect(shutil.copytree(world.folder, tmp_path / "copy"), 20) as pool:
        shutil.rmtree(tmp_path / "copy")
        assert world.hub is not None
        pair = world.hub.server._router._keys
        world.stop_hub()

        async def start() -> HubServer:
            hub = HubServer(world.options.listen, pair, MemoryAuthority())
            await hub.start()
            return hub

        knows_no_pool = world.thread.run(start())
        eventually(lambda: knows_no_pool.counters["connections_refused"] > 0)
        world.thread.run(knows_no_pool.stop())
        world.start_hub()
        assert pool.status(timeout_s=20).target == 0


def test_without_a_hub_a_reset_raises_whatever_on_failure_says(world: HubWorld) -> None:
    pool = world.connect()
    world.stop_hub()
    for epoch in (None, 7):
        with pytest.raises(fence.ResetNotRecorded, match="engines go on with the KV they have: ask again") as caught:
            pool.reset(epoch, timeout_s=0.5, on_failure="bypass")
        assert caught.value.epoch == epoch


def test_kill_9_of_the_hub_again_and_again_costs_time_and_no_epoch(tmp_path: Path) -> None:
    process = HubProcess(tmp_path / "state", "--lease-seconds", "1").start()
    done, stop = list[fence.Reset](), threading.Event()
    with fence.Pool.connect(process.folder) as pool, ThreadPoolExecutor() as threads:

        def train() -> None:
            while not stop.is_set():
                done.append(pool.reset(timeout_s=60))

        training = threads.submit(train)
        try:
            for kill in range(4):
                seen = len(done)
                eventually(lambda seen=seen: len(done) >= seen + 3 or training.done(), "resets go on", 60)  # type: ignore[misc]
                time.sleep(0.003 * kill)
                process.kill()
                process.start()
            seen = len(done)
            eventually(lambda: len(done) >= seen + 2 or training.done(), "resets go on after the last kill", 60)
        finally:
            stop.set()
        training.result()
        assert all(reset.published for reset in done)
        epochs = [reset.epoch for reset in done]
        assert epochs == sorted(set(epochs))  # each one's own, never an older one
        assert pool.status().published == epochs[-1]
    assert process.end() == 0


EPOCHS = "give an integer from 0 to 9007199254740991"
WEIGHTS = ("wait_weights", "weight_update")


@pytest.mark.parametrize(
    ("calls", "keys", "text"),
    [
        (("reset",), {"epoch": -1}, f"epoch is -1; {EPOCHS}, or None for the next one"),
        (("reset",), {"on_failure": "stop"}, "on_failure is 'stop'; use 'bypass' or 'crash'"),
        (WEIGHTS, {"engines": "engine-0"}, "engines is 'engine-0'; give names of engines, or None for all"),
        (WEIGHTS, {"engines": []}, "engines is []; give names"),
        (("wait_weights",), {"other_than": ["0A" * 16]}, f"other_than is ['{'0A' * 16}']; give digests of 32 hex digits"),
        (WEIGHTS, {"label": "x" * 254}, "label is "),
        (WEIGHTS, {"label": 42}, "label is 42; give one printable line"),
        (WEIGHTS, {"label": "step-\udcff"}, "label is 'step-\\udcff'; give one printable line"),
        (WEIGHTS, {"label": "step-42\n"}, "label is 'step-42\\n'; give one printable line of 1 to 253 characters, such as step-42"),
        (("status", *WEIGHTS), {"timeout_s": "5"}, "timeout_s is '5'; give seconds"),
        (("status", *WEIGHTS), {"timeout_s": -1}, "timeout_s is -1; give seconds"),
    ],
)
def test_what_cannot_be_meant_is_named(world: HubWorld, calls: tuple[str, ...], keys: dict[str, object], text: str) -> None:
    async def awaited(call: str) -> None:
        async with await fence.AsyncPool.connect(world.folder) as pool:
            made = getattr(pool, call)(**keys)
            await (made.__aenter__() if hasattr(made, "__aenter__") else made)

    def called(call: str) -> None:
        with fence.Pool.connect(world.folder) as pool:
            getattr(pool, call)(**keys).__enter__()

    for call in calls:
        with pytest.raises(fence.ArgumentError) as caught:
            called(call)
        with pytest.raises(fence.ArgumentError) as caught_too:
            asyncio.run(awaited(call))
        for error in (caught.value, caught_too.value, pickle.loads(pickle.dumps(caught.value))):
            assert error.parameter in keys
            assert str(error).startswith(text)
    assert world.snapshot().target == 0


FIRST, SECOND = "b253cb79" + "0" * 24, "3f2a9c1e" + "1" * 24
TOKENS = [{"from_token": 0, "weights": FIRST, "label": "step-41"}, {"from_token": 37, "weights": SECOND}]
SAID = {"tokens": TOKENS, "epoch": 7, "cached_tokens": {"gpu": 0, "l1": 128, "l2": 0}}


@pytest.mark.parametrize(
    "response",
    [
        {"choices": [{}], "kv_transfer_params": {"epochkv": SAID}},
        SimpleNamespace(outputs=[1], kv_transfer_params={"epochkv": SAID, "other": 1}),
        {"choices": [{}], "kv_transfer_params": {"epochkv": {"samples": [SAID]}}},
    ],
)
def test_an_answer_as_json_and_as_an_object(response: Any) -> None:
    (stamp,) = fence.stamps(response)
    assert stamp == fence.Stamp((fence.Made(0, FIRST, "step-41"), fence.Made(37, SECOND)), 7, {"gpu": 0, "l1": 128, "l2": 0})
    assert [stamp.of(token).weights for token in (0, 36, 37, 500)] == [FIRST, FIRST, SECOND, SECOND]
    assert stamp.weights == ""
    assert not stamp.is_of("step-41")


def test_an_answer_of_one_policy_and_one_of_unknown_weights() -> None:
    (stamp,) = fence.stamps({"kv_transfer_params": {"epochkv": {"tokens": TOKENS[:1]}}})
    assert stamp is not None
    assert stamp.weights == FIRST
    assert all(stamp.is_of(name) for name in ("step-41", FIRST, FIRST[:8]))
    assert not any(stamp.is_of(name) for name in (FIRST[:7], SECOND, "step-4", ""))
    assert not fence.Stamp((fence.Made(0, FIRST),)).is_of(""), "weights without a label are not called so"
    swapped = fence.Stamp((fence.Made(0, FIRST, adapter=SECOND), fence.Made(9, FIRST, adapter=FIRST)))
    assert (swapped.weights, swapped.is_of(FIRST)) == ("", False)
    (stamp,) = fence.stamps({"kv_transfer_params": {"epochkv": {"tokens": [{"from_token": 0, "weights": "unknown"}]}}})
    assert stamp is not None
    assert (stamp.weights, stamp.is_of("unknown")) == ("", False)
    for token in (-1, 0):
        with pytest.raises(IndexError):
            fence.Stamp(()).of(token)


NO_STAMPS: list[Any] = [None, 3, SAID, {"samples": [None, {}]}, {"samples": 3}, {"tokens": None}, {"tokens": [{"from_token": 0}, 3]}]


@pytest.mark.parametrize("params", [None, {}, {"other": 1}, *({"epochkv": said} for said in NO_STAMPS)])
def test_no_stamp_or_one_of_an_unknown_choice(params: Any) -> None:
    assert fence.stamps({"choices": [{}, {}], "kv_transfer_params": params}) == [None, None]


Question = ms.Status | ms.Bump | ms.Label
Report = Callable[[list[bytes]], object]


def connection(endpoint: str, uid: str, keys: ClientKeys) -> Connection:
    variables = {HUB_PUBLIC_ENV: keys.hub_public, CLIENT_PUBLIC_ENV: keys.public, CLIENT_SECRET_ENV: keys.secret}
    return Connection.load({"pool": {"name": "p", "uid": uid}, "hub": {"endpoint": endpoint}}, variables)


@contextmanager
def false_hub(answer: Callable[[Question, Report], None]) -> Iterator[Connection]:
    """A hub that any key may reach; `answer` gets each question and a way to send frames back."""
    hub, client = generate_keypair(), generate_keypair()
    stopping = threading.Event()
    with closing(FakeHub(hub)) as fake, ThreadPoolExecutor() as threads:

        def serve() -> None:
            while not stopping.is_set():
                if fake.socket.poll(50):
                    message = fake.hear()
                    assert isinstance(message, Question)
                    answer(message, fake.say)

        serving = threads.submit(serve)
        try:
            yield connection(fake.endpoint, "u", ClientKeys(hub.public, *client))
        finally:
            stopping.set()
        serving.result()


def honest(message: Question, say: Report) -> None:
    """What a hub says that publishes at once, of a pool with one engine."""
    match message:
        case ms.Status(request, after=after):
            engines = [ms.EngineStatus(b"e" * 16, 0, engine="a", weights=NEW)] if after is None else []
            say(ms.encode(ms.Status(request, total=1, engines=engines, lease_seconds=30.0, pool="u", after=after)))
        case ms.Bump(request, epoch):
            say(ms.encode(ms.BumpStatus(request, epoch, epoch, epoch)))
        case ms.Label(request, weights, label):
            say(ms.encode(ms.Labelled(request, weights, label)))


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
    ms.encode(ms.Grant(b"b" * 16, 1, 5, 30.0)),
    ms.encode(ms.Heartbeat(b"b" * 16, 1)),
    ms.encode(ms.Error(ms.Refusal.LIMIT, "slow down")),
    ms.encode(ms.Status(424242, 99, 99, lease_seconds=30.0)),
    ms.encode(ms.BumpStatus(424242, 1, 99, 99)),
    ms.encode(ms.Labelled(424242, NEW, "step-1")),
]


def test_garbage_strangers_and_duplicates_between_true_answers_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, take = list[type](), Session._take
    monkeypatch.setattr(Session, "_take", lambda self, message: taken.append(type(message)) or take(self, message))

    def answer(message: Question, say: Report) -> None:
        for frames in GARBAGE:
            say(frames)
        request = message.request  # of the wrong kind, about another epoch, page, weights or label, and no hub's answer at all
        if not isinstance(message, ms.Status):
            say(ms.encode(ms.Status(request, 99, 99, lease_seconds=30.0)))
        if not isinstance(message, ms.Bump):
            say(ms.encode(ms.BumpStatus(request, 1, 99, 99)))
        if not isinstance(message, ms.Label):
            say(ms.encode(ms.Labelled(request, NEW, "step-1")))
        say(ms.encode(ms.BumpStatus(request, 8, 99, 99)))
        say(ms.encode(ms.Status(request, 99, 99, lease_seconds=30.0, after=b"z" * 16)))
        say(ms.encode(ms.Status(request, 99, 99)))
        say(ms.encode(ms.Labelled(request, OTHER, "step-1")))
        say(ms.encode(ms.Labelled(request, NEW, "step-2")))
        for _ in range(3):
            honest(message, say)

    with false_hub(answer) as way, fence.Pool.connect(way, 20) as pool:
        reset = pool.reset()
        assert (reset.epoch, reset.published) == (1, True)
        assert [(group.id, group.label) for group in pool.wait_weights(label="step-1").groups] == [(NEW.hex(), "step-1")]
    assert {ms.Grant, ms.Heartbeat, ms.Error, ms.Labelled} < set(taken)


def test_what_a_hub_said_is_published_is_so_though_it_falls_silent() -> None:
    asked = set[int]()

    def answer(message: Question, say: Report) -> None:
        asked.add(message.request)
        if len(asked) <= 2:  # not when it is asked for the engines
            say(ms.encode(ms.Status(message.request, 7, 7, total=3, lease_seconds=30.0, pool="u")))

    with false_hub(answer) as way, fence.Pool.connect(way, 20) as pool:
        found = pool.wait(7, timeout_s=3)
        assert (found.published, found.engines, len(asked)) == (True, 3, 3)


def test_engines_of_later_pages_are_found_though_those_of_earlier_pages_leave() -> None:
    pages = {None: (b"ab", 5), b"b" * 16: (b"cd", 3), b"d" * 16: (b"e", 3), b"e" * 16: (b"", 3)}

    def answer(message: Question, say: Report) -> None:
        assert isinstance(message, ms.Status)
        here, total = pages[message.after]
        engines = [ms.EngineStatus(bytes([one]) * 16, 0, engine=chr(one)) for one in here]
        say(ms.encode(ms.Status(message.request, total=total, engines=engines, lease_seconds=30.0, pool="u", after=message.after)))

    with false_hub(answer) as way, fence.Pool.connect(way, 20) as pool:
        assert [engine.name for engine in pool.engines()] == ["a", "b", "c", "d", "e"]


def test_a_hub_that_falls_silent_after_the_first_answer_or_answers_about_other_labels() -> None:
    asked: list[Any] = []

    def answer(message: Question, say: Report) -> None:
        if isinstance(message, ms.Status):
            honest(message, say)
            return
        asked.append(message)
        if isinstance(message, ms.Label):
            for answer in (ms.Labelled(message.request, OTHER, "step-1"), ms.Labelled(message.request, NEW, "step-2")):
                say(ms.encode(answer))
            say(ms.encode(ms.BumpStatus(message.request, 1, 99, 99)))

    said = r"no answer from .*\. all engines hold the same weights, and that 3f2a9c1e are called 'step-1' is not known to be noted$"
    with false_hub(answer) as way, fence.Pool.connect(way, 20) as pool:
        with pytest.raises(fence.ResetNotRecorded, match=r"no hub is known to have recorded epoch 1 within 1\.5 s"):
            pool.reset(timeout_s=1.5)
        with pytest.raises(fence.HubUnreachable, match=said):
            pool.wait_weights(label="step-1", timeout_s=0.5)
        for kind in (ms.Bump, ms.Label):
            assert len([one for one in asked if isinstance(one, kind)]) >= 3  # it was repeated
            assert len({one.request for one in asked if isinstance(one, kind)}) == 1
        assert {(one.weights, one.label) for one in asked if isinstance(one, ms.Label)} == {(NEW, "step-1")}
