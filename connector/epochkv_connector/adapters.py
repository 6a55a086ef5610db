"""Which version of an adapter this engine serves: a digest of its files, looked at on a thread of its own.

vLLM names an adapter's blocks by the adapter's name and path, and an engine next door may have read other files there, or apply
them to other modules. vLLM reads them when it is asked to load an adapter (`loading`), with the first request, or again when its
cache of adapters was too small. So a digest names an adapter only while its files, its folder and the links to it are as they
were before this engine started; what is newer, has changed or cannot be read has a version that no other engine and no earlier
state has.
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from epochkv_connector.weights import Stamp, digest_of, files_of, stamp_of, way_to

logger = logging.getLogger("vllm.epochkv.adapters")

WAIT_SECONDS = 0.5
"""How long a question about an adapter may take; loading it takes longer. While one is open nobody waits for another."""
GRANULARITY_NS = 20_000_000
"""Times of files are those of the kernel's coarse clock, which is late by a tick."""
MAX_ADAPTERS = 10_000

Key = tuple[int, str]


@dataclass(frozen=True, slots=True)
class Version:
    """Of an adapter's files.

    Attributes:
        shareable: other engines with this version have the same adapter. Else it is this boot's own.
        stable: it is known what vLLM reads; else no two requests have one name.
        changed: the files are not what they were when they were first looked at.
    """

    name: str
    shareable: bool
    stable: bool = True
    changed: bool = False


@dataclass(slots=True)
class _Adapter:
    stamp: Stamp | None = None  # None: nobody has looked; empty: the files cannot be read
    digest: str | None = None
    changed: bool = False  # since the first look: vLLM has either, and may read them again whenever it needs room
    answered: threading.Event | None = None  # of the latest question


class AdapterVersions:
    """Versions by (id that vLLM gives an adapter each time it is loaded, path). `version` is for the scheduler thread.

    Args:
        applied: how this engine applies adapters, part of every version.
        since: when this engine started, in ns since the epoch of the clock; default: now.
    """

    def __init__(self, applied: str = "", since: int | None = None) -> None:
        self._applied = applied
        self._since = (time.time_ns() if since is None else since) - GRANULARITY_NS
        self._adapters: dict[Key, _Adapter] = {}
        self._questions: queue.SimpleQueue[tuple[Key, threading.Event] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._unknown = itertools.count()

    def version(self, adapter_id: int, path: str, layout: str = "") -> Version:
        """What the files say now. Waits at most `WAIT_SECONDS`. `layout`: how vLLM is told to read them."""
        adapter = self._looked_at((adapter_id, path))
        if adapter is None or not adapter.stamp or adapter.changed:
            return self._nobodys(path, changed=adapter is not None and adapter.changed)
        if adapter.digest is None:
            return Version(f"{path}#{adapter_id}", shareable=False)
        return Version(f"{adapter.digest}/{self._applied}/{layout}", shareable=True)

    def _looked_at(self, key: Key) -> _Adapter | None:
        """The adapter as its files are now; None: too many, or too slow."""
        adapter = self._adapters.get(key)
        if adapter is None:
            if len(self._adapters) >= MAX_ADAPTERS:
                return None
            adapter = self._adapters[key] = _Adapter()
        if adapter.answered is not None and not adapter.answered.is_set():
            return None
        adapter.answered = threading.Event()
        self._ask(key, adapter.answered)
        return adapter if adapter.answered.wait(WAIT_SECONDS) else None

    def close(self) -> None:
        """End the thread when it has done what it does."""
        self._questions.put(None)

    def loaded(self, adapter_id: int, path: str) -> None:
        """vLLM has read the files; before, there were none to look at: it has fetched them."""
        adapter = self._adapters.get((adapter_id, path))
        asked = adapter is not None and adapter.answered is not None and not adapter.answered.is_set()
        if adapter is not None and adapter.stamp == () and not adapter.changed and not asked:
            del self._adapters[adapter_id, path]

    def _nobodys(self, path: str, changed: bool = False) -> Version:
        return Version(f"{path}?{next(self._unknown)}", shareable=False, stable=False, changed=changed)

    def _ask(self, key: Key, answered: threading.Event) -> None:
        self._questions.put((key, answered))
        if self._thread is None:
            thread = threading.Thread(target=self._serve, name="epochkv-adapters", daemon=True)
            thread.start()
            self._thread = thread

    def _serve(self) -> None:
        while (question := self._questions.get()) is not None:
            key, answered = question
            adapter = self._adapters[key]
            try:
                self._look(adapter, key[1])
            except Exception as error:
                logger.debug("EpochKV: the files of adapter %s cannot be read (%s): its KV stays in this engine", key[1], error)
                self._saw(adapter, ())
            answered.set()

    def _look(self, adapter: _Adapter, path: str) -> None:
        files, stamp = _now(path)
        if not self._saw(adapter, stamp):
            return
        if adapter.changed:
            logger.warning("EpochKV: the files of adapter %s were changed while it is served: its KV is not reused from now on", path)
        elif files and all(changed < self._since for *_, changed in stamp):
            digest = digest_of(files, whole=True)
            if _now(path)[1] == stamp:
                adapter.digest = digest

    @staticmethod
    def _saw(adapter: _Adapter, stamp: Stamp) -> bool:
        """Whether this is another stamp than before: what was known of the files is not true of these."""
        if stamp == adapter.stamp:
            return False
        adapter.changed = adapter.stamp is not None
        adapter.stamp, adapter.digest = stamp, None
        return True


def _now(path: str) -> tuple[list[Path], Stamp]:
    folder = _folder(path)
    files = files_of(folder, adapter=True)
    return files, stamp_of(files) + way_to(folder)


def _folder(path: str) -> Path:
    """Where vLLM has read the adapter from: a folder, or the local copy of a repository of the Hugging Face hub."""
    place = Path(path).expanduser()
    if place.exists() or os.path.isabs(place):
        return place
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(path, local_files_only=True))
