"""The admin channel: asks each process of an engine, by name and with a deadline, outside vLLM's steps.

vLLM has no call from the scheduler half to its workers between steps, and none at all for a person. So every worker rank,
and the scheduler half, listen on a ZeroMQ IPC socket of their own in a folder that only this user may enter. A request is
`[id, name, argument]`, its answer `[id, OK, JSON]` or `[id, ERR, reason]`. Handlers run on threads of their own: what raises
or is late is an ERR, and nothing that a client sends, or dies in the middle of, ends the serving thread. Lookups, loads and
saves never wait for this channel.

For a person: `python -m epochkv_connector.admin STATUS` (see `--help`).
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import logging
import os
import secrets
import socket
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq

logger = logging.getLogger("vllm.epochkv.admin")

FOLDER_ENV = "EPOCHKV_ADMIN_DIR"
DEADLINES = {"STATUS": 5.0, "DRAIN": 10.0, "RECLAIM": 30.0, "REMOVE_ALL": 30.0}
"""Request -> seconds after which it is answered ERR, whatever its handler does."""

MAX_OPEN = 32
"""Requests that a process works on at a time, those included that were answered because they were late."""
MAX_MESSAGE_BYTES = 1 << 16
MAX_PATH_BYTES = 107
"""Of a Unix socket, on Linux."""
STALE_SECONDS = 60.0
"""A socket that nobody serves is removed when it is this old: a younger one may be about to be served."""
GRACE_SECONDS = 0.5
UNKNOWN = "unknown request"
"""How the reason of an ERR begins when a process does not serve the request: the scheduler half knows STATUS alone."""

Handler = Callable[[str, float], Mapping[str, Any]]
"""(argument, seconds it may take) -> JSON of the answer. Raises `Refused` for an ERR in words."""


class Refused(Exception):
    """A request that cannot be done; the message is the reason."""


class AdminError(RuntimeError):
    """The channel cannot be opened; says why."""


# -- where the sockets are -----------------------------------------------------------------------------------------


def base_folder(environ: Mapping[str, str] | None = None) -> Path:
    """The folder of all engines of this user on this machine."""
    given = (os.environ if environ is None else environ).get(FOLDER_ENV)
    return Path(given) if given else Path(tempfile.gettempdir()) / f"epochkv-{os.geteuid()}"


def engine_folder(engine_id: str, base: Path | None = None) -> Path:
    """The folder of one engine (`kv_transfer_config.engine_id`), the same in all of its processes on this machine."""
    name = hashlib.blake2b(engine_id.encode(), digest_size=6).hexdigest()
    return (base_folder() if base is None else base) / name


def rank_socket(folder: Path, rank: int) -> Path:
    """Where a worker rank listens."""
    return folder / f"rank{rank}"


def _make_private(folder: Path) -> None:
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise AdminError(f"{folder} is not a folder of this user alone (0700); remove it, or set {FOLDER_ENV} to another place")


def _is_served(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(0.2)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # it is too busy to say
            return True
    return True


def sweep(base: Path) -> int:
    """Remove sockets that killed engines have left behind; returns how many."""
    removed = 0
    with contextlib.suppress(OSError):
        for path in sorted(base.glob("*/*")):
            with contextlib.suppress(OSError):
                old = time.time() - path.lstat().st_mtime > STALE_SECONDS
                if old and path.is_socket() and not _is_served(path):
                    path.unlink()
                    removed += 1
                    path.parent.rmdir()  # fails while others are in it
    return removed


# -- the serving side ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Call:
    peer: bytes
    request_id: bytes
    name: str
    until: float


class AdminServer:
    """Serves one socket on a daemon thread.

    Args:
        path: of the socket; its folder is made, for this user alone.
        handlers: by request.
        deadlines: seconds by request.
    """

    def __init__(self, path: Path, handlers: Mapping[str, Handler], deadlines: Mapping[str, float] | None = None) -> None:
        self.path = path
        self._handlers = dict(handlers)
        self._deadlines = {**DEADLINES, **(deadlines or {})}
        self._lock = threading.Lock()
        self._open: dict[int, _Call] = {}  # serving thread only
        self._done: list[tuple[int, bytes, bytes]] = []  # guarded, as is the next
        self._running = 0
        self._stopping = False
        self._tokens = 0
        self._errors = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._thread = threading.Thread(target=self._serve, name="epochkv-admin", daemon=True)
        self._wake_read, self._wake_write = socket.socketpair()
        for end in (self._wake_read, self._wake_write):
            end.setblocking(False)
        self._router: zmq.Socket[bytes] | None = None

    def start(self) -> None:
        """Bind and serve.

        Raises:
            AdminError: the folder is not this user's alone, the path is too long, or the socket cannot be bound.
        """
        try:
            if len(os.fsencode(self.path)) > MAX_PATH_BYTES:
                raise AdminError(
                    f"{self.path} is longer than a socket's path may be ({MAX_PATH_BYTES} bytes); set {FOLDER_ENV} to a shorter one"
                )
            self.path.parent.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            _make_private(self.path.parent.parent)
            _make_private(self.path.parent)
            sweep(self.path.parent.parent)
            router = self._context.socket(zmq.ROUTER)
            router.setsockopt(zmq.LINGER, 0)
            router.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
            router.bind(f"ipc://{self.path}")
        except (OSError, zmq.ZMQError) as error:
            raise AdminError(f"the admin channel {self.path} cannot be opened: {error}") from error
        self._router = router
        self._thread.start()
        logger.info("EpochKV: admin channel at %s", self.path)

    def stop(self, timeout: float = 1.0) -> bool:
        """End within `timeout` seconds and remove the socket; False if the thread did not end. A second call does nothing."""
        self._stopping = True
        self._wake()
        if self._thread.is_alive():
            self._thread.join(timeout)
        if self._thread.is_alive():
            return False
        if self._router is not None:
            self._router.close(0)
            self._router = None
            with contextlib.suppress(OSError):
                self.path.unlink()
            with contextlib.suppress(OSError):
                self.path.parent.rmdir()  # the last one out
        self._context.destroy(0)
        return True

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it wakes up anyway; closed: it has ended
            self._wake_write.send(b"x")

    def _serve(self) -> None:
        assert self._router is not None
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        while not self._stopping:
            try:
                until = min((call.until for call in self._open.values()), default=time.monotonic() + 60.0)
                poller.poll(int(max(0.0, until - time.monotonic()) * 1e3) + 1)
                self._step(self._router)
            except Exception as error:
                self._errors += 1
                if self._errors == 1:
                    logger.exception("EpochKV: the admin channel met an unexpected error (%s); further ones are not logged", error)
                time.sleep(0.05)

    def _step(self, router: zmq.Socket[bytes]) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_read.recv(4096):
                pass
        with self._lock:
            done, self._done = self._done, []
        for token, status, body in done:
            call = self._open.pop(token, None)
            if call is not None:  # else it was late and has been answered
                self._reply(router, call.peer, call.request_id, status, body)
        now = time.monotonic()
        for token in [token for token, call in self._open.items() if call.until <= now]:
            call = self._open.pop(token)
            reason = f"{call.name} was not done within {self._deadlines[call.name]:g} s"
            self._reply(router, call.peer, call.request_id, b"ERR", reason.encode())
        with contextlib.suppress(zmq.Again):
            for _ in range(64):  # then others get their turn
                self._take(router, router.recv_multipart(zmq.NOBLOCK))

    def _take(self, router: zmq.Socket[bytes], frames: Sequence[bytes]) -> None:
        peer, rest = frames[0], frames[1:]
        request_id = rest[0] if rest else b""
        name = rest[1].decode(errors="replace") if len(rest) > 1 else ""
        handler = self._handlers.get(name)
        with self._lock:
            full = self._running >= MAX_OPEN
        reason = ""
        if len(rest) != 3:
            reason = f"a request is [id, name, argument]; got {len(rest)} frames"
        elif handler is None:
            reason = f"{UNKNOWN} {name[:40]!r}; known: {', '.join(self._handlers)}"
        elif full:
            reason = f"{MAX_OPEN} requests are being worked on (or hang)"
        if reason or handler is None:
            self._reply(router, peer, request_id[:64], b"ERR", reason.encode())
            return
        self._tokens += 1
        seconds = self._deadlines[name]
        self._open[self._tokens] = _Call(peer, request_id, name, time.monotonic() + seconds)
        with self._lock:
            self._running += 1
        work = (self._tokens, handler, rest[2].decode(errors="replace"), seconds)
        threading.Thread(target=self._run, args=work, name=f"epochkv-admin-{name}", daemon=True).start()

    def _run(self, token: int, handler: Handler, argument: str, seconds: float) -> None:
        try:
            status, body = b"OK", json.dumps(handler(argument, seconds)).encode()
        except Refused as error:
            status, body = b"ERR", str(error).encode()
        except BaseException as error:
            status, body = b"ERR", f"{type(error).__name__}: {error}".encode()
        with self._lock:
            self._running -= 1
            self._done.append((token, status, body))
        self._wake()

    @staticmethod
    def _reply(router: zmq.Socket[bytes], peer: bytes, request_id: bytes, status: bytes, body: bytes) -> None:
        with contextlib.suppress(zmq.ZMQError):  # it is gone, or does not read
            router.send_multipart([peer, request_id, status, body], zmq.NOBLOCK)


# -- the asking side -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer, or what stands in for one that did not come.

    Attributes:
        body: of an OK.
        reason: of an ERR; "" for an OK.
    """

    body: dict[str, Any] = field(default_factory=dict)
    reason: str = ""

    @property
    def ok(self) -> bool:
        """Whether it was done."""
        return not self.reason


def ask(path: Path, name: str, argument: str = "", timeout: float | None = None) -> Reply:
    """Ask one process; returns within `timeout` seconds (default: the request's deadline and a little more). Never raises."""
    seconds = DEADLINES.get(name, 1.0) + GRACE_SECONDS if timeout is None else timeout
    if not path.exists():
        return Reply(reason=f"nobody listens at {path}")
    try:
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.IMMEDIATE, 1)  # no queue for a process that is gone
            dealer.connect(f"ipc://{path}")
            return _exchange(dealer, name, argument, time.monotonic() + seconds) or Reply(reason=f"no answer within {seconds:g} s")
    except (zmq.ZMQError, OSError, ValueError) as error:
        return Reply(reason=f"{type(error).__name__}: {error}")


def _exchange(dealer: zmq.Socket[bytes], name: str, argument: str, until: float) -> Reply | None:
    request_id = secrets.token_bytes(8)

    def left() -> int:
        return max(0, int((until - time.monotonic()) * 1e3))

    if not dealer.poll(left(), zmq.POLLOUT):
        return None
    dealer.send_multipart([request_id, name.encode(), argument.encode()], zmq.NOBLOCK)
    while dealer.poll(left(), zmq.POLLIN):
        frames = dealer.recv_multipart(zmq.NOBLOCK)
        if len(frames) != 3 or frames[0] != request_id:
            continue
        if frames[1] == b"OK":
            return Reply(body=dict(json.loads(frames[2])))
        return Reply(reason=frames[2].decode(errors="replace") or "no reason given")
    return None


def ask_all(paths: Iterable[Path], name: str, argument: str = "", timeout: float | None = None) -> dict[Path, Reply]:
    """Ask several processes at once."""
    wanted = list(paths)
    with ThreadPoolExecutor(max(1, min(len(wanted), 16)), thread_name_prefix="epochkv-admin-ask") as pool:
        return dict(zip(wanted, pool.map(lambda path: ask(path, name, argument, timeout), wanted), strict=True))


class RankWatch:
    """What the worker ranks last said of reads that are over; asked again, on a thread of its own, whenever somebody wants to know.

    For engines whose ranks are other processes: an idle one makes no step in which they could report.

    Args:
        paths: of every rank's socket, in rank order.
        on_news: told when a rank says of a job for the first time that it is over.
        period: seconds between two questions at least.
    """

    def __init__(self, paths: Sequence[Path], on_news: Callable[[], None] = lambda: None, period: float = 0.25) -> None:
        self._paths = list(paths)
        self._on_news = on_news
        self._period = period
        self._over: list[frozenset[int]] = [frozenset() for _ in self._paths]
        self._asking = threading.Lock()
        self._asked_at = -period

    def reads_over(self) -> list[frozenset[int]]:
        """By rank, the loads that deliver nothing any more and whose end the rank has not reported yet. Never waits; any thread."""
        if time.monotonic() - self._asked_at >= self._period and self._asking.acquire(blocking=False):
            self._asked_at = time.monotonic()
            threading.Thread(target=self._ask, name="epochkv-rank-watch", daemon=True).start()
        return list(self._over)

    def _ask(self) -> None:
        try:
            replies = ask_all(self._paths, "STATUS")
            over = [frozenset(map(int, replies[path].body.get("reads_over", ()))) for path in self._paths]
            news = any(now - before for now, before in zip(over, self._over, strict=True))
            self._over = over
        except Exception:
            logger.debug("asking the ranks failed", exc_info=True)
            return
        finally:
            self._asking.release()
        if news:
            self._on_news()


# -- for a person --------------------------------------------------------------------------------------------------

_HELP = """Ask the processes of EpochKV engines of this user on this machine, outside vLLM's steps.

  STATUS            what each process counts; asks every engine unless some are named
  DRAIN [EPOCH]     wait for transfers to end; with EPOCH, give up puts of older epochs first
  RECLAIM PREFIX    remove the pool's stored blocks whose names begin so
  REMOVE_ALL        remove all stored blocks of the pool

All but STATUS change something and need --engine, --socket or --all."""

_EPILOG = "Exit status: 0: all who were asked answered OK; 1: not so (the last line says who), or nobody listens; 2: wrong usage."


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask engines and print a line for each process; 0 if every one that serves the request answered OK."""
    parser = _parser()
    args = parser.parse_intermixed_args(arguments)
    base = args.dir or base_folder()
    if args.request != "STATUS" and not (args.engine or args.socket or args.all):
        parser.error(f"{args.request} changes something: say for which engines with --engine ID (as STATUS prints it), or --all")
    if args.request == "RECLAIM" and not args.argument:
        parser.error("RECLAIM needs the beginning of names: PREFIX")
    if args.request == "REMOVE_ALL" and args.argument:
        parser.error(f"REMOVE_ALL takes no argument and would ignore {args.argument!r}; RECLAIM removes what begins with a PREFIX")
    wanted = {name: _sockets_of(name, base) for name in args.engine or ()}
    wanted |= {str(path): [path] for path in args.socket or ()}
    if not (args.engine or args.socket):
        wanted = {folder.name: _sockets_in(folder) for folder in sorted(base.glob("*"))}
    paths = list(dict.fromkeys(path for found in wanted.values() for path in found))
    served = {path for path in paths if _is_served(path)}
    replies = ask_all([path for path in paths if path in served], args.request, args.argument)
    for path in paths:
        _say(path, replies.get(path))
    answered = {path for path, reply in replies.items() if not _skipped(reply)}
    failed = [_name(path) for path in paths if path in answered and not replies[path].ok]
    if args.engine or args.socket:
        silent = {name: found for name, found in wanted.items() if answered.isdisjoint(found)}
        failed += [f"{name} ({'nobody there serves it' if found else 'no such engine'})" for name, found in silent.items()]
    if failed:
        print(f"{args.request} failed: {', '.join(failed)}", file=sys.stderr)
    elif not answered:
        print(f"{args.request} failed: no engine listens below {base}", file=sys.stderr)
    return 1 if failed or not answered else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m epochkv_connector.admin",
        description=_HELP,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("request", choices=sorted(DEADLINES), metavar="REQUEST", help=", ".join(sorted(DEADLINES)))
    parser.add_argument("argument", nargs="?", default="", metavar="ARGUMENT", help="EPOCH or PREFIX")
    whom = parser.add_mutually_exclusive_group()
    whom.add_argument(
        "--engine",
        action="append",
        metavar="ID",
        help="this one (again for more): what STATUS prints before the slash, its kv_transfer_config.engine_id, or its process id",
    )
    whom.add_argument("--all", action="store_true", help="every engine of this user on this machine, of whatever pool")
    whom.add_argument("--socket", type=Path, action="append", metavar="PATH", help="one process alone; engines log their paths at start")
    parser.add_argument("--dir", type=Path, help=f"where engines make their sockets (default: {base_folder()}, or ${FOLDER_ENV})")
    return parser


def _sockets_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*") if path.is_socket())


def _sockets_of(name: str, base: Path) -> list[Path]:
    """Sockets of an engine by its folder, its `engine_id`, or the process id (alone, or as in `epochkv engines`: host:pid)."""
    found = _sockets_in(base / name) if Path(name).name == name else []
    found = found or _sockets_in(engine_folder(name, base))
    pid = name.rpartition(":")[2]
    if not found and pid.isdecimal():
        served = [path for path in sorted(base.glob("*/*")) if path.is_socket() and _is_served(path)]
        owners = [path.parent for path, reply in ask_all(served, "STATUS").items() if str(reply.body.get("pid")) == pid]
        found = _sockets_in(owners[0]) if owners else []
    return found


def _name(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def _skipped(reply: Reply) -> bool:
    """It does not serve the request at all, which is no failure of it."""
    return reply.reason.startswith(UNKNOWN)


def _say(path: Path, reply: Reply | None) -> None:
    if reply is None:
        print(f"{_name(path)}: gone, nobody listens there any more")
    elif not _skipped(reply):
        print(f"{_name(path)}: {'OK ' + json.dumps(reply.body, sort_keys=True) if reply.ok else 'ERR ' + reply.reason}")


if __name__ == "__main__":
    sys.exit(main())
