"""The admin channel over real sockets: whatever clients send, die in or ask too much of, the next request is answered."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import zmq

from epochkv_connector import admin
from epochkv_connector.admin import AdminError, AdminServer, RankWatch, Refused, ask_all
from epochkv_connector.ranks import RankHandlers, open_channel
from epochkv_connector.records import Phase
from epochkv_connector.store import Outcome
from tests.helpers_store import wait_until
from tests.unit.connector_worker.test_worker_half import NAMESPACE, ObedientStore, Rig, move, save


def echo(argument: str, seconds: float) -> Mapping[str, Any]:
    return {"said": argument}


def ask(path: Path, name: str, argument: str = "", timeout: float = 20.0) -> admin.Reply:
    """With patience: a starved machine is no fault."""
    return admin.ask(path, name, argument, timeout)


Serve = Callable[..., AdminServer]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tmp_path / "a"


@pytest.fixture
def serve(base: Path) -> Iterator[Serve]:
    made: list[AdminServer] = []

    def build(name: str = "e/rank0", deadlines: Mapping[str, float] | None = None, **handlers: Any) -> AdminServer:
        server = AdminServer(base / name, {"STATUS": echo, **handlers}, deadlines)
        server.start()
        made.append(server)
        return server

    yield build
    for server in made:
        assert server.stop()


def test_a_request_is_answered_by_name(serve: Serve) -> None:
    server = serve(DRAIN=lambda argument, seconds: {"seconds": seconds})
    assert ask(server.path, "STATUS", "héllo") == admin.Reply({"said": "héllo"})
    assert ask(server.path, "DRAIN") == admin.Reply({"seconds": 10.0})
    reply = ask(server.path, "RECLAIM", "x")
    assert (reply.ok, reply.reason) == (False, "unknown request 'RECLAIM'; known: STATUS, DRAIN")


def test_the_folders_are_this_users_alone_and_go_with_the_last_socket(base: Path) -> None:
    servers = [AdminServer(base / "engine" / name, {"STATUS": echo}) for name in ("rank0", "rank1")]
    for server in servers:
        server.start()
    assert [(base / part).stat().st_mode & 0o777 for part in (".", "engine")] == [0o700, 0o700]
    assert servers[0].stop()
    assert not (base / "engine" / "rank0").exists()
    assert ask(base / "engine" / "rank1", "STATUS").ok
    assert servers[1].stop()
    assert servers[1].stop(), "a second call does nothing"
    assert not (base / "engine").exists()


@pytest.mark.parametrize("spoil", ["open", "link", "file", "long"])
def test_a_place_that_others_could_reach_is_refused(base: Path, spoil: str) -> None:
    base.mkdir(mode=0o700)
    path = base / "engine" / ("r" * 120 if spoil == "long" else "rank0")
    if spoil == "open":
        (base / "engine").mkdir()
        (base / "engine").chmod(0o755)
    elif spoil == "link":
        (base / "elsewhere").mkdir(mode=0o700)
        (base / "engine").symlink_to(base / "elsewhere")
    elif spoil == "file":
        (base / "engine").write_text("")
    server = AdminServer(path, {"STATUS": echo})
    with pytest.raises(AdminError, match="longer" if spoil == "long" else "not a folder of this user alone"):
        server.start()
    server.stop()
    assert open_channel(path, {"STATUS": echo}) is None, "an engine goes on without"


def test_garbage_ends_nothing(serve: Serve) -> None:
    server = serve()
    for garbage in (b"", b"\x00" * 5000, b"GET / HTTP/1.1\r\n\r\n", os.urandom(300)):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as raw:
            raw.connect(str(server.path))
            raw.sendall(garbage)
    answers: list[list[bytes]] = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(f"ipc://{server.path}")
        for frames in ([b""], [b"1"], [b"1", b"STATUS"], [b"1", b"\xff\xfe", b""], [b"1", b"STATUS", b"", b"more"], [b"x"] * 200):
            dealer.send_multipart(frames)
            assert dealer.poll(5000)
            answers.append(dealer.recv_multipart())
        dealer.send_multipart([b"2", b"STATUS", b"\xff\xfe"])
        assert dealer.poll(5000)
        assert json.loads(dealer.recv_multipart()[2]) == {"said": "\ufffd\ufffd"}
        dealer.send_multipart([b"3", b"STATUS", b"x" * (admin.MAX_MESSAGE_BYTES + 1)])
        assert not dealer.poll(200), "a message that is too long costs its sender the connection"
    assert [frames[1] for frames in answers] == [b"ERR"] * 6
    assert ask(server.path, "STATUS", "still here").body == {"said": "still here"}


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt(), Refused("in words")])
def test_what_a_handler_raises_is_an_err(serve: Serve, error: BaseException) -> None:
    def broken(argument: str, seconds: float) -> Mapping[str, Any]:
        raise error

    server = serve(DRAIN=broken)
    reply = ask(server.path, "DRAIN")
    assert not reply.ok
    assert reply.reason == ("in words" if isinstance(error, Refused) else f"{type(error).__name__}: {error}")
    assert ask(server.path, "STATUS").ok


def test_an_answer_that_is_no_json_is_an_err(serve: Serve) -> None:
    server = serve(DRAIN=lambda argument, seconds: {"x": object()})
    assert "not JSON serializable" in ask(server.path, "DRAIN").reason
    assert ask(server.path, "STATUS").ok


def test_a_handler_that_hangs_costs_its_own_request_a_deadline(serve: Serve) -> None:
    go_on, begun = threading.Event(), threading.Semaphore(0)

    def hang(argument: str, seconds: float) -> Mapping[str, Any]:
        begun.release()
        go_on.wait(30)
        return {"late": True}

    server = serve(deadlines={"DRAIN": 0.2}, DRAIN=hang)
    assert ask(server.path, "DRAIN").reason == "DRAIN was not done within 0.2 s"
    assert begun.acquire(timeout=5)
    assert ask(server.path, "STATUS", "meanwhile").body == {"said": "meanwhile"}
    # When all threads hang, requests are refused at once, and not when they can be served again.
    replies = ask_all([server.path] * (admin.MAX_OPEN - 1), "DRAIN", timeout=20.0)
    assert all(not reply.ok for reply in replies.values())
    wait_until(lambda: "being worked on" in ask(server.path, "STATUS").reason, 20, "every thread hangs")
    go_on.set()
    wait_until(lambda: ask(server.path, "STATUS").ok, 10, "served again")


def test_a_server_stops_although_a_handler_hangs(base: Path) -> None:
    go_on, begun = threading.Event(), threading.Event()

    def hang(argument: str, seconds: float) -> Mapping[str, Any]:
        begun.set()
        go_on.wait(30)
        return {}

    server = AdminServer(base / "e" / "rank0", {"STATUS": hang})
    server.start()
    replies: list[admin.Reply] = []
    client = threading.Thread(target=lambda: replies.append(ask(server.path, "STATUS", timeout=1.0)))
    client.start()
    assert begun.wait(5)
    assert server.stop(5.0)
    go_on.set()
    client.join(10)
    assert [reply.ok for reply in replies] == [False]
    assert ask(server.path, "STATUS").reason == f"nobody listens at {server.path}"


def test_a_client_that_dies_while_it_waits_hurts_nobody(serve: Serve) -> None:
    go_on, begun = threading.Event(), threading.Event()

    def slow(argument: str, seconds: float) -> Mapping[str, Any]:
        begun.set()
        go_on.wait(30)
        return {"big": "x" * 30_000}

    server = serve(DRAIN=slow)
    code = f"from epochkv_connector.admin import ask; from pathlib import Path; ask(Path({str(server.path)!r}), 'DRAIN', timeout=30)"
    with subprocess.Popen([sys.executable, "-c", code]) as client:
        assert begun.wait(20)
        client.kill()
    assert client.returncode == -signal.SIGKILL
    go_on.set()
    assert ask(server.path, "STATUS", "alive").body == {"said": "alive"}


def test_many_clients_get_their_own_answers(serve: Serve) -> None:
    server = serve()
    wrong: list[str] = []

    def client(number: int) -> None:
        for turn in range(5):
            text = f"{number}.{turn}"
            reply = ask(server.path, "STATUS", text, timeout=20.0)
            if reply.body != {"said": text}:
                wrong.append(f"{text}: {reply}")

    threads = [threading.Thread(target=client, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []


def test_two_engines_on_one_machine_do_not_meet(base: Path) -> None:
    paths = [admin.rank_socket(admin.engine_folder(name, base), 0) for name in ("one", "other")]
    assert paths[0].parent != paths[1].parent
    servers = [AdminServer(path, {"STATUS": lambda argument, seconds, path=path: {"at": str(path)}}) for path in paths]
    for server in servers:
        server.start()
    assert {path: reply.body["at"] for path, reply in ask_all(paths, "STATUS").items()} == {path: str(path) for path in paths}
    assert servers[0].stop()
    assert [ask(path, "STATUS").ok for path in paths] == [False, True]
    assert servers[1].stop()


def test_what_a_killed_engine_leaves_behind_is_taken_over_or_swept(base: Path, serve: Serve) -> None:
    killed = [base / "killed" / "rank0", base / "e" / "rank0"]
    code = (
        "import sys, time; from pathlib import Path; from epochkv_connector.admin import AdminServer\n"
        "for path in sys.argv[1:]: AdminServer(Path(path), {'STATUS': lambda a, s: {'old': True}}).start()\n"
        "print('up', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, *map(str, killed)], stdout=subprocess.PIPE) as engine:
        assert engine.stdout
        assert engine.stdout.readline() == b"up\n"
        assert ask(killed[0], "STATUS").body == {"old": True}
        engine.kill()
    assert [path.is_socket() for path in killed] == [True, True], "nobody has cleaned up"
    assert ask(killed[0], "STATUS", timeout=0.5).reason == "no answer within 0.5 s"
    server = serve("e/rank0")
    assert ask(server.path, "STATUS", "new").body == {"said": "new"}
    assert killed[0].is_socket(), "it may be about to be served: it is young"
    for path in (killed[0], server.path):
        os.utime(path, (time.time() - 120, time.time() - 120))
    assert admin.sweep(base) == 1
    assert not killed[0].parent.exists()
    assert ask(server.path, "STATUS").ok, "old, and served"


Captured = pytest.CaptureFixture[str]
KILLED = """
import os, signal, sys
from pathlib import Path
from epochkv_connector.admin import AdminServer
for path in sys.argv[1:]: AdminServer(Path(path), {"STATUS": lambda argument, seconds: {}, "DRAIN": lambda argument, seconds: {}}).start()
os.kill(os.getpid(), signal.SIGKILL)
"""


def leave_behind(*paths: Path) -> None:
    """Sockets of an engine that was killed."""
    child = subprocess.run([sys.executable, "-c", KILLED, *map(str, paths)], check=False)
    assert (child.returncode, *(path.is_socket() for path in paths)) == (-signal.SIGKILL, *(True for _ in paths))


def call(capsys: Captured, base: Path, *arguments: str) -> tuple[int, list[str], list[str]]:
    """Exit status, lines of the output, lines of errors."""
    capsys.readouterr()
    try:
        status = admin.main([*arguments, "--dir", str(base)])
    except SystemExit as end:
        status = int(str(end.code))
    said = capsys.readouterr()
    return status, said.out.splitlines(), said.err.splitlines()


def test_the_command_line_prints_a_line_for_each_process(base: Path, serve: Serve, capsys: Captured) -> None:
    nobody = [f"STATUS failed: no engine listens below {base}"]
    assert call(capsys, base, "STATUS") == (1, [], nobody)
    serve("e/rank0"), serve("e/rank1"), serve("f/rank0")
    lines = [f'{name}: OK {{"said": "all"}}' for name in ("e/rank0", "e/rank1", "f/rank0")]
    assert call(capsys, base, "STATUS", "all") == (0, lines, [])
    assert call(capsys, base, "STATUS", "all", "--engine", "e") == (0, lines[:2], [])
    assert call(capsys, base, "STATUS", "--engine", "f", "all") == (0, lines[2:], [])
    assert call(capsys, base, "STATUS", "all", "--socket", str(base / "e" / "rank1")) == (0, lines[1:2], [])


@pytest.mark.parametrize("request_", ["DRAIN", "RECLAIM", "REMOVE_ALL"])
def test_a_request_that_changes_something_names_its_engines(base: Path, serve: Serve, capsys: Captured, request_: str) -> None:
    asked: list[str] = []

    def note(argument: str, seconds: float) -> Mapping[str, Any]:
        asked.append(argument)
        return {}

    handlers = {request_: note}
    for name in ("e/rank0", "f/rank0"):
        serve(name, **handlers)
    first, second = ((), ()) if request_ == "REMOVE_ALL" else (("1",), ("2",))
    status, out, err = call(capsys, base, request_, *first)
    assert (status, out, asked) == (2, [], [])
    assert err[-1].endswith(f"{request_} changes something: say for which engines with --engine ID (as STATUS prints it), or --all")
    assert call(capsys, base, request_, *first, "--engine", "f") == (0, ["f/rank0: OK {}"], [])
    assert call(capsys, base, request_, *second, "--all") == (0, ["e/rank0: OK {}", "f/rank0: OK {}"], [])
    assert asked == ["".join(first), *("".join(second),) * 2]
    if request_ == "REMOVE_ALL":
        assert call(capsys, base, request_, "some/prefix", "--all")[0] == 2
        assert len(asked) == 3


def test_who_does_not_serve_a_request_is_skipped(base: Path, serve: Serve, capsys: Captured) -> None:
    serve("e/rank0", DRAIN=echo), serve("e/scheduler")
    assert call(capsys, base, "DRAIN", "7", "--all") == (0, ['e/rank0: OK {"said": "7"}'], [])
    assert call(capsys, base, "DRAIN", "--socket", str(base / "e" / "scheduler"))[0] == 1, "it alone was asked"


def test_an_engine_is_found_by_what_its_owner_knows_of_it(base: Path, capsys: Captured) -> None:
    path = admin.rank_socket(admin.engine_folder("my engine", base), 0)
    server = AdminServer(path, {"STATUS": lambda argument, seconds: {"pid": os.getpid()}})
    server.start()
    line = f'{path.parent.name}/rank0: OK {{"pid": {os.getpid()}}}'
    for name in (path.parent.name, "my engine", str(os.getpid()), f"host:{os.getpid()}"):
        assert call(capsys, base, "STATUS", "--engine", name) == (0, [line], []), name
    failed = "STATUS failed: {} (no such engine)"
    for name in ("other", "../a", "1", ""):
        assert call(capsys, base, "STATUS", "--engine", name) == (1, [], [failed.format(name)]), name
    assert call(capsys, base, "STATUS", "--engine", "other", "--engine", "my engine") == (1, [line], [failed.format("other")])
    assert server.stop()


def test_who_is_gone_is_told_at_once_and_fails_nobody_else(base: Path, serve: Serve, capsys: Captured) -> None:
    leave_behind(base / "killed" / "rank0", base / "killed" / "rank1")
    gone = [f"killed/rank{rank}: gone, nobody listens there any more" for rank in (0, 1)]
    assert call(capsys, base, "STATUS") == (1, gone, [f"STATUS failed: no engine listens below {base}"])
    serve("e/rank0", DRAIN=echo)
    began = time.monotonic()
    assert call(capsys, base, "DRAIN", "--all") == (0, ['e/rank0: OK {"said": ""}', *gone], [])
    assert time.monotonic() - began < admin.DEADLINES["DRAIN"], "nobody was waited for"
    failed = ["DRAIN failed: killed (nobody there serves it)"]
    assert call(capsys, base, "DRAIN", "--engine", "killed", "--engine", "e") == (1, [*gone, 'e/rank0: OK {"said": ""}'], failed)


def test_who_failed_is_named(base: Path, serve: Serve, capsys: Captured) -> None:
    def refuse(argument: str, seconds: float) -> Mapping[str, Any]:
        raise Refused("not now")

    serve("e/rank0", DRAIN=refuse), serve("e/rank1", DRAIN=echo)
    lines = ["e/rank0: ERR not now", 'e/rank1: OK {"said": ""}']
    assert call(capsys, base, "DRAIN", "--all") == (1, lines, ["DRAIN failed: e/rank0"])


def test_help_says_what_each_request_does(base: Path, capsys: Captured) -> None:
    status, out, err = call(capsys, base, "--help")
    assert (status, err) == (0, [])
    for name in admin.DEADLINES:
        assert any(line.split()[:1] == [name] for line in out), name
    assert call(capsys, base, "RECLAIM", "--all")[0] == 2, "of which names"


# -- what ranks answer ------------------------------------------------------------------------------------------------


class Removals:
    """A store client that notes what it is told to remove."""

    def __init__(self) -> None:
        self.prefixes: list[str] = []

    def remove_by_prefix(self, prefix: str, timeout: float = 10.0) -> int:
        self.prefixes.append(prefix)
        return 3


POOL = NAMESPACE.split("/", maxsplit=1)[0]


def test_a_drain_gives_up_puts_of_older_epochs_and_waits_for_those_under_way(serve: Serve) -> None:
    store = ObedientStore(policy=lambda kind, transfers: None)
    rig = Rig(store)
    server = serve(deadlines={"DRAIN": 1.0}, **RankHandlers(rig.worker, None, POOL).table())
    rig.step(saves=[save(1, [move(3, 0, 30)], NAMESPACE)])  # of epoch 7
    rig.until_acked(1, Phase.COPIED)
    wait_until(lambda: store.open, 5, "the put is under way")
    (request,) = store.open
    assert ask(server.path, "DRAIN", "7").ok, "epoch 7 is not below 7"
    assert not request.ticket.cancelled
    assert ask(server.path, "DRAIN", "8").reason == "1 saves of epochs below 8 are still under way"
    assert request.ticket.cancelled
    assert ask(server.path, "DRAIN").reason == "1 slots are still in use"
    store.answer(request, Outcome.CANCELLED)
    assert not ask(server.path, "DRAIN", "8").ok, "the store has answered and still reads the slot"
    store.release(request)
    assert ask(server.path, "DRAIN", "8").body == {"left": 0}
    assert ask(server.path, "DRAIN").body == {"left": 0}
    assert rig.until_acked(1, Phase.STORED).failed
    rig.step(saves=[save(2, [move(4, 1, 40)], NAMESPACE)])
    assert rig.until_acked(2, Phase.STORED).failed, "no put of an older epoch begins afterwards"
    assert len(store.seen) == 1
    status = ask(server.path, "STATUS").body
    assert (status["rank"], status["open_jobs"], status["pid"]) == (0, 0, os.getpid())
    assert status["stats"]["save_put_dropped_stale"] == 1
    assert "takes an epoch or nothing" in ask(server.path, "DRAIN", "-1").reason


def test_removals_stay_within_the_pool(serve: Serve) -> None:
    removals = Removals()
    server = serve(**RankHandlers(Rig().worker, removals, POOL).table())
    for prefix in ("", "other/", "/", f"{POOL}x", POOL[:-1], ".*"):
        assert not ask(server.path, "RECLAIM", prefix).ok
    assert removals.prefixes == []
    for prefix in (POOL, f"{POOL}/", f"{POOL}/0011"):
        assert ask(server.path, "RECLAIM", prefix).body == {"removed": 3}
    assert ask(server.path, "REMOVE_ALL").body == {"removed": 3}
    assert removals.prefixes == [f"{POOL}/", f"{POOL}/", f"{POOL}/0011", f"{POOL}/"]
    bare = serve("e/rank1", **RankHandlers(Rig().worker, None, POOL).table())
    assert ask(bare.path, "REMOVE_ALL").reason == "this engine has no distributed tier"


def test_ranks_are_asked_what_is_over_and_nobody_waits_for_them(serve: Serve) -> None:
    go_on = threading.Event()
    over: list[list[int]] = [[], [5]]

    def status(rank: int) -> Any:
        def handler(argument: str, seconds: float) -> Mapping[str, Any]:
            go_on.wait(20)
            return {"reads_over": over[rank]}

        return handler

    paths = [serve(f"e/rank{rank}", STATUS=status(rank)).path for rank in range(2)]
    news: list[int] = []
    watch = RankWatch(paths, lambda: news.append(1), period=0.0)
    assert watch.reads_over() == [frozenset(), frozenset()]
    (asking,) = [thread for thread in threading.enumerate() if thread.name == "epochkv-rank-watch"]
    assert watch.reads_over() == [frozenset(), frozenset()]
    assert asking.is_alive(), "the ranks hang; nobody waits for them"
    go_on.set()
    wait_until(lambda: watch.reads_over() == [frozenset(), {5}], 10, "rank 1 has said so")
    over[0] = [5, 6]
    wait_until(lambda: watch.reads_over() == [{5, 6}, {5}], 10, "rank 0, too")
    wait_until(lambda: len(news) == 2, 5, "the news are told once each")
    gone = RankWatch([paths[0], paths[0].with_name("rank9")], period=0.0)
    wait_until(lambda: gone.reads_over() == [{5, 6}, frozenset()], 10, "a rank that is not there says nothing")
