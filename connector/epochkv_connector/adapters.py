"""Which version of an adapter this engine serves: a digest of its files, looked at on a thread of its own.

vLLM names an adapter's blocks by the adapter's name and path, and an engine next door may have read other files there. What is
not known (yet), or has changed since this engine first saw it, has a version that no other engine and no earlier state has.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from epochkv_connector.weights import Stamp, digest_of, files_of, stamp_of

logger = logging.getLogger("vllm.epochkv.adapters")

FIRST_WAIT_SECONDS = 0.1
"""How long the first request of an adapter waits for its digest; loading it takes longer."""
RECHECK_SECONDS = 1.0
MAX_ADAPTERS = 10_000

Key = tuple[int, str]


@dataclass(frozen=True, slots=True)
class Version:
    """`shareable`: other engines with this version have the same adapter. Else it is this boot's own."""

    name: str
    shareable: bool


@dataclass(slots=True)
class _Adapter:
    digest: str | None = None
    stamp: Stamp = ()
    changes: int = 0
    looked_at: float = 0.0
    asked: bool = True
    seen: threading.Event = field(default_factory=threading.Event)


class AdapterVersions:
    """Versions by (id that vLLM gives an adapter each time it is loaded, path). `version` is for the scheduler thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._adapters: dict[Key, _Adapter] = {}
        self._questions: queue.SimpleQueue[Key | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def version(self, adapter_id: int, path: str) -> Version:
        """What this engine has now. Waits at most `FIRST_WAIT_SECONDS`, the first time."""
        key = (adapter_id, path)
        adapter = self._adapters.get(key)
        if adapter is None and len(self._adapters) < MAX_ADAPTERS:
            adapter = self._adapters[key] = _Adapter()
            self._ask(key)
            adapter.seen.wait(FIRST_WAIT_SECONDS)
        elif adapter is not None and not adapter.asked and self._clock() - adapter.looked_at >= RECHECK_SECONDS:
            adapter.asked = True
            self._ask(key)
        if adapter is None or adapter.digest is None:
            return Version(f"{path}#{adapter_id}.{adapter.changes if adapter else 0}", shareable=False)
        return Version(adapter.digest, shareable=True)

    def close(self) -> None:
        """End the thread when it has done what it does."""
        self._questions.put(None)

    def _ask(self, key: Key) -> None:
        self._questions.put(key)
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="epochkv-adapters", daemon=True)
            self._thread.start()

    def _serve(self) -> None:
        while (key := self._questions.get()) is not None:
            adapter = self._adapters[key]
            try:
                self._look(adapter, key[1])
            except Exception as error:  # not there (any more): what the engine has loaded it keeps
                if adapter.digest is None:
                    logger.debug("the files of adapter %s cannot be read (%s): its KV stays in this engine", key[1], error)
            adapter.looked_at, adapter.asked = self._clock(), False
            adapter.seen.set()

    def _look(self, adapter: _Adapter, path: str) -> None:
        files = files_of(_folder(path), adapter=True)
        stamp = stamp_of(files)
        if not adapter.stamp:
            digest = digest_of(files, whole=True)
            if files and stamp_of(files_of(_folder(path), adapter=True)) == stamp:  # else it is being written: next time
                adapter.stamp, adapter.digest = stamp, digest
        elif stamp != adapter.stamp:
            # vLLM may have read either, or read the new ones later (its cache of adapters is small).
            adapter.stamp, adapter.digest = stamp, None
            adapter.changes += 1
            logger.warning("the files of adapter %s were changed while it is served: its KV stays in this engine from now on", path)


def _folder(path: str) -> Path:
    """Where vLLM has read the adapter from: a folder, or the local copy of a repository of the Hugging Face hub."""
    place = Path(path).expanduser()
    if place.exists() or os.path.isabs(place):
        return place
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(path, local_files_only=True))
