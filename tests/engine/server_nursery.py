"""vLLM's OpenAI server at a fraction of its price: a process that has imported it, and forks one server for each engine.

An engine of the tests uses 23 s of CPU before it answers, 20 of them to import the same modules twice, in the server and in its
core (measured). What is forked is the same server with the same command line in a session of its own, so that it is ended,
frozen and killed like any other. `test_attach`, `test_fenced` and `tests/e2e` start theirs as a user does.

    python -m tests.engine.server_nursery SOCKET
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NoReturn, Self

from hack.standalone.engine import CPU_ENVIRONMENT
from hack.standalone.mooncake import CLIENT_ENVIRONMENT
from hack.standalone.process import Process

IMPORTS = (
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.model_executor.models.qwen3",
)
REPLY_SECONDS = 60.0
"""For the fork, which takes milliseconds."""
REAP_SECONDS = 0.05


class ForkedServer:
    """Of `subprocess.Popen` what `Process` uses, for a process that is a child of the nursery."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection  # with a deadline for the first answer
        self._received = b""
        self.pid = int(self._line())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status, if it has ended."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """The exit status, negative for a signal.

        Raises:
            subprocess.TimeoutExpired: it has not ended within `timeout` seconds.
        """
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                self.returncode = int(self._line())
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired("a forked server", timeout) from None
            self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """To the server alone, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def _line(self) -> bytes:
        while b"\n" not in self._received:
            part = self._connection.recv(64)
            if not part:
                raise RuntimeError("the nursery is gone")
            self._received += part
        line, _, self._received = self._received.partition(b"\n")
        return line


class ServerNursery:
    """The process that has imported vLLM and forks servers. Use as a context manager; servers end before it does."""

    def __init__(self, directory: Path) -> None:
        self._socket = directory / "servers.sock"
        command = [sys.executable, "-m", "tests.engine.server_nursery", str(self._socket)]
        root = Path(__file__).resolve().parents[2]
        self.process = Process("server nursery", command, directory / "servers.log", {**CPU_ENVIRONMENT, **CLIENT_ENVIRONMENT}, cwd=root)

    def popen(self, command: Sequence[str], *, stdout: IO[bytes], env: Mapping[str, str], **_: Any) -> ForkedServer:
        """As `subprocess.Popen`, for a `command` that starts with `PYTHON -m MODULE`; standard error goes to `stdout`."""
        self.process.wait_until(self._socket.exists, 120.0, "listening")
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(REPLY_SECONDS)
        connection.connect(str(self._socket))
        text = json.dumps({"module": command[2], "arguments": list(command[3:]), "environ": dict(env)}).encode()
        socket.send_fds(connection, [len(text).to_bytes(4, "big")], [stdout.fileno()])
        connection.sendall(text)
        return ForkedServer(connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.process.end()


def fork_cores() -> None:
    """vLLM spawns cores and workers on CPUs, whatever the environment says: fork them, as it does elsewhere."""
    from vllm.platforms.cpu import CpuPlatform

    settle = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]

    def settle_and_fork(cls: type[CpuPlatform], vllm_config: Any) -> None:
        settle(cls, vllm_config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = classmethod(settle_and_fork)  # type: ignore[assignment]


def serve(asked: Mapping[str, Any], log: int, connection: socket.socket) -> NoReturn:
    status = 1
    try:
        os.setsid()
        connection.sendall(f"{os.getpid()}\n".encode())  # now, as whoever asked may end the group at once
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.closerange(3, 256)  # the nursery's own: its listening socket, connections of other engines
        os.environ.clear()
        os.environ.update(asked["environ"])
        sys.argv = [asked["module"], *asked["arguments"]]
        fork_cores()
        runpy.run_module(asked["module"], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def receive(connection: socket.socket) -> tuple[Mapping[str, Any], int]:
    """What to be, and the file to log to."""
    head, fds, _, _ = socket.recv_fds(connection, 4, 1)
    length, text = int.from_bytes(head, "big"), b""
    while len(text) < length:
        if not (part := connection.recv(length - len(text))):
            raise EOFError
        text += part
    return json.loads(text), fds[0]


def reap(connections: dict[int, socket.socket]) -> None:
    """Tell how servers ended."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            with connections.pop(ended[0]) as connection, suppress(OSError):  # whoever asked for it is gone
                connection.sendall(f"{os.waitstatus_to_exitcode(ended[1])}\n".encode())


def main() -> None:
    for name in IMPORTS:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # otherwise every child copies what its collector touches
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{sys.argv[1]}.new")
    listener.listen()
    os.rename(f"{sys.argv[1]}.new", sys.argv[1])
    listener.settimeout(REAP_SECONDS)
    connections: dict[int, socket.socket] = {}
    parent = os.getppid()
    while os.getppid() == parent:  # or the tests were killed
        reap(connections)
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        connection.settimeout(REPLY_SECONDS)
        try:
            asked, log = receive(connection)
        except (OSError, ValueError, IndexError, EOFError):  # whoever asked for it is gone
            connection.close()
            continue
        if (pid := os.fork()) == 0:
            serve(asked, log, connection)
        os.close(log)
        connections[pid] = connection


if __name__ == "__main__":
    main()
