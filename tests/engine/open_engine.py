"""Whole engines that tests look into, at a second or two each: what tests see of the processes in which `open_child` runs.

The test process never imports vLLM.
"""

import pickle
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from hack.standalone.engine import CPU_ENVIRONMENT
from hack.standalone.mooncake import CLIENT_ENVIRONMENT, Mooncake
from hack.standalone.process import Process
from tests.engine.conftest import PATIENT_ENVIRON, settled_keys
from tests.support.nursery import Nursery

ANSWER_SECONDS = 120.0
BLOCK = 32
"""Tokens per KV block of every engine here: prompts of a few hundred tokens have many blocks, and the CPU kernels accept it."""


@dataclass(frozen=True)
class Request:
    """One prompt. `image`: seed of the picture that its placeholder stands for; `uuid`: what the client calls it."""

    tokens: tuple[int, ...]
    max_tokens: int = 12
    image: int | None = None
    uuid: str | None = None


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

    arguments: Mapping[str, Any]
    schedule_ahead: bool = False
    prepare: Callable[[], None] | None = None


class EngineFailed(RuntimeError):
    """The engine raised or gave no answer; the message has its own words."""


class OpenEngine:
    """One engine in a process of its own. Starting begins at once; the first call waits for it."""

    def __init__(
        self,
        servers: Nursery,
        directory: Path,
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
        self.name, self.log = name, directory / f"{name}.log"
        self._connection: Connection[Any, Any] | None = None
        small = {"skip_tokenizer_init": True, "enforce_eager": True, "dtype": "float32", "max_model_len": 1024, "max_num_seqs": 8}
        given = {
            **small,
            "model": str(model),
            "block_size": BLOCK,
            "enable_prefix_caching": prefix_caching,
            "disable_log_stats": False,
            "kv_transfer_config": dict(connector) if connector is not None else None,
            **arguments,
        }
        self._socket, start = directory / f"{name}.sock", directory / f"{name}.start"
        start.write_bytes(pickle.dumps(Start(given, schedule_ahead, prepare)))
        command = [sys.executable, "-m", "tests.engine.open_child", str(self._socket), str(start)]
        own = {**CPU_ENVIRONMENT, **CLIENT_ENVIRONMENT, **PATIENT_ENVIRON, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", **(environ or {})}
        self.process = Process(name, command, self.log, own, popen=servers.popen)
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
        """Have it shut down in order. Safe to call twice.

        Raises:
            EngineFailed: it does not.
        """
        connection, self._connection = self._connection, None
        try:
            if connection is not None:
                connection.close()
                if (status := self.process.popen.wait(30.0)) != 0:
                    raise self._failed(f"ended with status {status}")
        finally:
            self.process.end()

    def _call(self, command: str, argument: Any) -> Any:
        if self._connection is None:
            self.process.wait_until(self._socket.exists, ANSWER_SECONDS, "started")
            self._connection = Client(str(self._socket), "AF_UNIX")
        self._connection.send((command, argument))
        if not self._connection.poll(ANSWER_SECONDS):
            raise self._failed(f"no answer to {command} within {ANSWER_SECONDS:.0f} s")
        try:
            worked, answer = self._connection.recv()
        except EOFError:
            raise self._failed(f"ended during {command}") from None
        if not worked:
            raise self._failed(f"{command} failed:\n{answer}")
        return answer

    def _failed(self, what: str) -> EngineFailed:
        return EngineFailed(f"{self.name}: {what}; its log ends with\n{self.process.tail(60)}")
