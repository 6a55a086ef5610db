"""`epochkv`, also `python -m epochkv_fence.cli`."""

from __future__ import annotations

import sys

from epochkv_fence.cli import Exit


def main() -> None:
    """Run the command line. What is interrupted before a command begins, or after it, says no more than that."""
    try:
        from epochkv_fence.cli.app import run

        run()
    except KeyboardInterrupt:
        print("epochkv: interrupted", file=sys.stderr)
        sys.exit(Exit.INTERRUPTED)
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "click"):
            raise
        print(f"epochkv: {error.name} is not installed; install epochkv[trainer]", file=sys.stderr)
        sys.exit(Exit.USAGE)


if __name__ == "__main__":
    main()
