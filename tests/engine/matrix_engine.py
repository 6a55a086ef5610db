"""Whole engines for the matrix tests, at a second or two each: what tests see of the processes that `matrix_child` forks.

The test process never imports vLLM.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hack.standalone.engine import CPU_ENVIRONMENT
from hack.standalone.mooncake import CLIENT_ENVIRONMENT, Mooncake
from hack.standalone.process import Process
from tests.engine.conftest import PATIENT_ENVIRON, settled_keys

ANSWER_SECONDS = 120.0
BLOCK = 32
"""Tokens per KV block of every engine here: prompts of a few hundred tokens have many blocks, and the CPU kernels accept it."""


@dataclass(frozen=True)
class Request:
    """One prompt. `adapter`: folder of a LoRA adapter; `image`: seed of the picture that its placeholder stands for."""

    tokens: tuple[int, ...]
    max_tokens: int = 12
    salt: str | None = None
    adapter: str | None = None
    image: int | None = None


@dataclass(frozen=True)
class Output:
    """Token ids with their logprobs, and how many tokens of the prompt came from a cache of any tier.

    `margins`: nats between the likeliest token and the next one. `preempted`: how many tokens there were each time that the request
    was preempted.
    """

    tokens: tuple[int, ...]
    cached: int
    logprobs: tuple[float, ...] = ()
    margins: tuple[float, ...] = ()
    preempted: tuple[int, ...] = ()


@dataclass(frozen=True)
class Start:
    """What an engine is started with: `arguments` of vLLM's `LLM`, whether to schedule ahead although this is a CPU, and what else
    to do in its process before."""

    log: str
    arguments: Mapping[str, Any]
    schedule_ahead: bool = False
    prepare: Callable[[], None] | None = None
    environ: Mapping[str, str] = field(default_factory=dict)


class EngineFailed(RuntimeError):
    """The engine raised or gave no answer; the message has its own words."""


class Nursery:
    """The process that has imported vLLM and forks engines. Use as a context manager."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.socket = directory / "nursery.sock"
        environ = {**CPU_ENVIRONMENT, **CLIENT_ENVIRONMENT, **PATIENT_ENVIRON, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        command = [sys.executable, "-m", "tests.engine.matrix_child", str(self.socket)]
        root = Path(__file__).resolve().parents[2]
        self.process = Process("engine nursery", command, directory / "nursery.log", environ, cwd=root)

    def connect(self) -> Connection[Any, Any]:
        """A connection to a newly forked process."""
        self.process.wait_until(self.socket.exists, 120.0, "listening")
        return Client(str(self.socket), "AF_UNIX")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.process.end()


class MatrixEngine:
    """One engine in a process of its own. Starting begins at once; the first call waits for it."""

    def __init__(
        self,
        nursery: Nursery,
        name: str,
        model: Path,
        connector: Mapping[str, Any] | None = None,
        *,
        prefix_caching: bool = True,
        schedule_ahead: bool = False,
        prepare: Callable[[], None] | None = None,
        environ: Mapping[str, str] | None = None,
        **arguments: Any,
    ) -> None:
        self.name, self.log = name, nursery.directory / f"{name}.log"
        self._connection: Connection[Any, Any] | None = nursery.connect()
        given = {
            "model": str(model),
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "dtype": "float32",
            "max_model_len": 1024,
            "max_num_seqs": 8,
            "block_size": BLOCK,
            "enable_prefix_caching": prefix_caching,
            "disable_log_stats": False,
            "kv_transfer_config": dict(connector) if connector is not None else None,
            **arguments,
        }
        self._send("start", Start(str(self.log), given, schedule_ahead, prepare, dict(environ or {})))
        self._starting = True
        self._before: dict[str, Any] = {}

    def run(self, requests: Sequence[Request]) -> list[Output]:
        """All of them at once, greedy; answers in order."""
        answers: list[Output] = self._call("run", list(requests))
        return answers

    def forget(self) -> None:
        """Empty the engine's own prefix cache, and no other tier; fails when a block is still held."""
        assert self._call("forget", None) is True, f"{self.name}: vLLM did not reset its prefix cache"

    def do(self, function: Callable[[Any], Any]) -> Any:
        """What `function` makes of the `Served` in the engine's process; it is sent by its name."""
        return self._call("do", function)

    def facts(self) -> dict[str, Any]:
        """Counters since the start, as vLLM and the connector tell them, and what the scheduler was seen to do."""
        facts: dict[str, Any] = self._call("facts", None)
        return facts

    def gained(self) -> dict[str, float]:
        """Counters since the last call, or since the start."""
        before, self._before = self._before, self.facts()
        return {name: value - before.get(name, 0) for name, value in self._before.items() if isinstance(value, (int, float))}

    def ask(self, requests: Sequence[Request], expected: Sequence[tuple[int, ...]], cached: Sequence[int], **sources: int) -> None:
        """Run `requests`: answers are right, so many tokens of each came from a cache, and from these tiers (vLLM's names)."""
        self.gained()
        outputs = self.run(requests)
        assert [output.tokens for output in outputs] == list(expected)
        hits = [output.cached for output in outputs]
        assert hits == list(cached), f"{hits} tokens from a cache, not {list(cached)}"
        prefix = "prompt_tokens_cached_by_source/"
        found = {name.removeprefix(prefix): int(tokens) for name, tokens in self.gained().items() if name.startswith(prefix)}
        assert {name: tokens for name, tokens in found.items() if tokens} == {name: tokens for name, tokens in sources.items() if tokens}

    def join_store(self, mooncake: Mooncake, prompt: Callable[[int], tuple[int, ...]], num_tokens: int = BLOCK + 1) -> None:
        """Return once blocks of every rank arrive in the store: an engine connects to it in the background.

        Args:
            prompt: makes one of so many tokens that nobody else has.
            num_tokens: a block of every group, and more.
        """
        ranks = int(self.facts()["ranks"])
        deadline = time.monotonic() + ANSWER_SECONDS
        known = set(mooncake.keys())
        while len({key.split("/")[-2] for key in set(mooncake.keys()) - known}) < ranks:
            assert time.monotonic() < deadline, f"{self.name}: no blocks of every rank in the store within {ANSWER_SECONDS:.0f} s"
            self.run([Request(prompt(num_tokens), 1)])
            settled_keys(mooncake)

    def end(self) -> None:
        """Shut it down in order. Safe to call twice.

        Raises:
            EngineFailed: it does not end; the nursery kills it later.
        """
        connection, self._connection = self._connection, None
        if connection is None:
            return
        try:
            connection.send(("end", None))
            pid = connection.recv() if connection.poll(30.0) else None
        except (OSError, EOFError):
            pid = None
        connection.close()
        if pid is None:
            raise EngineFailed(f"{self.name} did not shut down; its log ends with\n{self._tail()}")

    def _call(self, command: str, argument: Any) -> Any:
        if self._starting:
            self._starting = False
            self._receive("start")
        self._send(command, argument)
        return self._receive(command)

    def _send(self, command: str, argument: Any) -> None:
        assert self._connection is not None, f"{self.name} was ended"
        self._connection.send((command, argument))

    def _receive(self, command: str) -> Any:
        assert self._connection is not None
        if not self._connection.poll(ANSWER_SECONDS):
            raise EngineFailed(f"{self.name}: no answer to {command} within {ANSWER_SECONDS:.0f} s; its log ends with\n{self._tail()}")
        try:
            worked, answer = self._connection.recv()
        except EOFError:
            raise EngineFailed(f"{self.name} ended during {command}; its log ends with\n{self._tail()}") from None
        if not worked:
            raise EngineFailed(f"{self.name}: {command} failed:\n{answer}\nits log ends with\n{self._tail()}")
        return answer

    def _tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-60:]) if self.log.exists() else "(no log)"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end()
