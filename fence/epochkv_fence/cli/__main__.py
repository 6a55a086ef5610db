"""`epochkv`, also `python -m epochkv_fence.cli`. Nothing is imported before somebody listens for Ctrl-C."""

import sys


def main() -> None:
    """Run the command line. What is interrupted before a command begins, or after it, says no more than that."""
    try:
        from epochkv_fence.cli.app import run

        run()
    except KeyboardInterrupt:
        print("epochkv: interrupted", file=sys.stderr)
        sys.exit(130)
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "click"):
            raise
        print(f"epochkv: {error.name} is not installed; install epochkv[trainer]", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
