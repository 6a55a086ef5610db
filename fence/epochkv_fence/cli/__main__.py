"""`epochkv`, also `python -m epochkv_fence.cli`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; without its libraries say how to get them."""
    try:
        from epochkv_fence.cli.app import run
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "click"):
            raise
        print(f"epochkv: {error.name} is not installed; install epochkv[trainer]", file=sys.stderr)
        sys.exit(2)
    run()


if __name__ == "__main__":
    main()
