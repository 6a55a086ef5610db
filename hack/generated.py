"""Files that are made from something else: written, or with `--check` only compared."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]


def keep(module: str, about: str | None, files: Mapping[Path, str]) -> int:
    """The command line of a module that makes files.

    Args:
        module: as `python -m` takes it.
        files: what each has to contain, by its path below the repository's root.

    Returns:
        Exit status: 0 when all are (now) up to date, 1 when `--check` finds a difference.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=about)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a file differs")
    check = parser.parse_args().check
    stale = [path for path, text in files.items() if not (ROOT / path).exists() or (ROOT / path).read_text(encoding="utf-8") != text]
    for path in stale:
        if check:
            print(f"{path} is not what python -m {module} makes: run it, and commit the result", file=sys.stderr)
        else:
            (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
            (ROOT / path).write_text(files[path], encoding="utf-8")
            print(f"wrote {path}")
    return 1 if check and stale else 0
