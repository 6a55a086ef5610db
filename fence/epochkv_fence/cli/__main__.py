"""`epochkv`, also `python -m epochkv_fence.cli`."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator

from epochkv_fence.cli import Exit


def main() -> None:
    """Run the command line. What is interrupted before a command begins, or after it, says no more than that."""
    try:
        _load()()
    except KeyboardInterrupt:
        print("epochkv: interrupted", file=sys.stderr)
        sys.exit(Exit.INTERRUPTED)


def _load() -> Callable[[], None]:
    """Import the command line; without its libraries say how to get them."""
    try:
        with _ending_at_once():
            from epochkv_fence.cli.app import run
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "click"):
            raise
        print(f"epochkv: {error.name} is not installed; install epochkv[trainer]", file=sys.stderr)
        sys.exit(Exit.USAGE)
    return run


@contextlib.contextmanager
def _ending_at_once() -> Iterator[None]:
    """Ctrl-C ends this process where it stands: in the middle of an import an exception may be swallowed, or become another one."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # ignored, as in a background job of a shell
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(number: int, frame: object) -> None:
    with contextlib.suppress(OSError):
        os.write(2, b"epochkv: interrupted\n")
    os._exit(Exit.INTERRUPTED)


if __name__ == "__main__":
    main()
