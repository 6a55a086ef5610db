"""Dynamo's indexer as a process."""

import json
import os
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from hack.loopback import free_port
from hack.standalone.process import Process
from tests.support.routers.wire import MODEL

DYNAMO = Path(__file__).parents[3] / ".build/dynamo"


class DynamoIndexer:
    """Dynamo's standalone indexer: it subscribes to engines by itself, and answers over HTTP. Use as a context manager."""

    def __init__(self, directory: Path, block_size: int) -> None:
        if not (DYNAMO / "dynamo").is_dir():
            raise RuntimeError("Dynamo's indexer is not there: run 'make setup-engine'")
        self._size, self._port = block_size, free_port()
        self.log = directory / "dynamo.log"
        command = [sys.executable, "-m", "dynamo.indexer", "--port", str(self._port), "--threads", "1"]
        self.process = Process("dynamo", command, self.log, {**os.environ, "PYTHONPATH": str(DYNAMO), "NO_COLOR": "1"})

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self._port}{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def _is_up(self) -> bool:
        try:
            self._ask("/health")
        except OSError:
            return False
        return True

    def follow(self, pod: int, endpoint: str) -> None:
        """Subscribe to an engine's events."""
        self._ask("/register", {"instance_id": pod, "endpoint": endpoint, "model_name": MODEL, "block_size": self._size})

    def blocks(self, pod: int) -> int:
        """What it believes that a pod holds, tiers apart."""
        (index,) = self._ask("/dump").values()
        stored = [entry["event"]["data"]["stored"]["blocks"] for entry in index["events"] if entry["worker_id"] == pod]
        return sum(map(len, stored))

    def find(self, tokens: Sequence[int]) -> dict[int, int]:
        """Pods, and how many blocks from the first on each holds, on the device or in host memory."""
        answer = self._ask("/query", {"token_ids": list(tokens), "model_name": MODEL})
        found = {int(pod): told["longest_matched"] // self._size for pod, told in answer["instances"].items()}
        return {pod: count for pod, count in found.items() if count}

    @property
    def dropped(self) -> list[str]:
        """Events that it could not place, as its log has them."""
        return [line for line in self.log.read_text(errors="replace").splitlines() if "WARN" in line or "ERROR" in line]

    def __enter__(self) -> Self:
        try:
            self.process.wait_until(self._is_up, 60.0, "answering")
        except BaseException:  # no `__exit__` follows
            self.process.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.process.end()
