"""A vLLM CPU engine behind its OpenAI server, as a process: prompts are token ids, so no tokenizer is needed."""

from __future__ import annotations

import copy
import http.client
import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from hack.engine_api import EngineApi, EngineError, completion, headers_of
from hack.loopback import free_port
from hack.standalone.mooncake import CLIENT_ENVIRONMENT
from hack.standalone.process import Popen, Process

CPU_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # /collective_rpc, to load new weights
    "VLLM_LOGGING_LEVEL": "INFO",
    "PYTHONHASHSEED": "0",
    # Two engines on few cores: a thread team that spins while it waits starves its neighbour.
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # otherwise vLLM sets another number of threads, and binds every engine to the same core
}

GPU_BLOCKS = 1024
"""Of 128 tokens; all that `VLLM_CPU_KVCACHE_SPACE` has room for would be written to at the start, 1 GB for each engine."""

_NO_ANSWER = (OSError, http.client.HTTPException)
"""A connection that breaks in the middle of an answer is the latter."""
_GRACE_SECONDS = 30.0
"""More than `--shutdown-timeout`, after which the server kills its engine."""


class Engine(EngineApi):
    """One engine. `connector` is the JSON of `--kv-transfer-config`, None for a cache-less reference; `python` has vLLM."""

    def __init__(
        self,
        name: str,
        model: Path,
        directory: Path,
        connector: Mapping[str, Any] | None = None,
        prefix_caching: bool = True,
        args: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        python: str | Path = sys.executable,
        popen: Popen = subprocess.Popen,
    ) -> None:
        self.name, self.model, self.port = name, "model", free_port()
        command = [
            str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "model",
            "--host", "127.0.0.1", "--port", str(self.port), "--skip-tokenizer-init", "--enforce-eager", "--dtype", "float32",
            "--max-model-len", "2048", "--max-num-seqs", "8", "--num-gpu-blocks-override", str(GPU_BLOCKS),
            "--enable-prompt-tokens-details", "--shutdown-timeout", "20",
            "--enable-prefix-caching" if prefix_caching else "--no-enable-prefix-caching", *args,
        ]  # fmt: skip
        if connector is not None:
            command += ["--kv-transfer-config", json.dumps(connector)]
        self._was_ready = False
        self._headers = headers_of()
        environ = {**CPU_ENVIRONMENT, **CLIENT_ENVIRONMENT, **(environ or {})}
        self.process = Process(name, command, directory / f"{name}.log", environ, popen=popen)

    def wait_ready(self, seconds: float = 600.0) -> Self:
        """Return once `/health` answers 200."""
        self.process.wait_until(lambda: self._status("/health") == 200, seconds, "healthy")
        self._was_ready = True
        return self

    def request(self, method: str, path: str, body: bytes | None = None, seconds: float = 120.0) -> bytes:
        """One HTTP request over loopback."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", body, self._headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=seconds) as answer:
                text: bytes = answer.read()
                return text
        except urllib.error.HTTPError as error:
            words = ""
            with suppress(*_NO_ANSWER):
                words = error.read().decode(errors="replace")[:500]
            raise EngineError(f"{self.name} {path}: HTTP {error.code}: {words}") from error
        except _NO_ANSWER as error:
            raise EngineError(f"{self.name} {path}: no answer: {error!r}") from error

    def stream(self, prompt: Sequence[int], max_tokens: int, transfer: Mapping[str, Any] | None = None) -> Iterator[dict[str, Any]]:
        """Chunks of a completion as they arrive. Whoever closes it gives the request up."""
        body = json.dumps({**completion(self.model, prompt, max_tokens, transfer), "stream": True}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/v1/completions", body, self._headers)
        with urllib.request.urlopen(request, timeout=120.0) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    yield json.loads(line.removeprefix(b"data: "))

    def of_rank(self, rank: int) -> Self:
        """The same engine, whose requests go to this data-parallel rank."""
        one = copy.copy(self)
        one.name, one._headers = f"{self.name}/{rank}", headers_of(rank)
        return one

    def _status(self, path: str) -> int:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=2) as answer:
                status: int = answer.status
                return status
        except urllib.error.HTTPError as error:
            return error.code
        except _NO_ANSWER:
            return 0

    def end(self) -> None:
        """As a kubelet ends a container: SIGTERM to the server, which ends its engine and workers; SIGKILL later to what is left.

        A server that still starts may be deaf, and has nobody to say goodbye to: then everybody is told, and given less time.
        """
        if self._was_ready:
            self.process.end(_GRACE_SECONDS, whole_group=False)
        else:
            self.process.end()

    def __enter__(self) -> Self:
        try:
            return self.wait_ready()
        except BaseException:  # no `__exit__` follows
            self.end()
            raise

    def __exit__(self, *_: object) -> None:
        self.end()
