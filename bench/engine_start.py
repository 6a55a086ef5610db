"""Engine start-up with the connector against without it, in turns on the same machine: seconds from process start to `/health`.

python -m bench.engine_start [--runs 3] [--json FILE]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from bench.report import Row, print_table, repeated, write_json
from hack.models import make
from hack.standalone.engine import Engine
from hack.standalone.mooncake import Mooncake
from hack.standalone.pool import Pool


def start_seconds(name: str, model: Path, directory: Path, connector: dict[str, object] | None) -> float:
    """Start an engine, wait for `/health`, end it."""
    begun = time.monotonic()
    with Engine(name, model, directory, connector):
        return time.monotonic() - begun


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.engine_start", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3, help="pairs to run (default 3)")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    figures: dict[str, list[float]] = {"with": [], "without": []}
    with (
        tempfile.TemporaryDirectory(prefix="epochkv-bench-") as folder,
        Mooncake(Path(folder)) as mooncake,
        Pool(Path(folder)) as pool,
    ):
        model = make(Path(folder) / "model", 1)
        connector = pool.connector(local_bytes=256 << 20, master_address=mooncake.address)
        start_seconds("warm-up", model, Path(folder), None)
        for run in range(arguments.runs):
            figures["without"].append(start_seconds(f"without-{run}", model, Path(folder), None))
            figures["with"].append(start_seconds(f"with-{run}", model, Path(folder), connector))
    ratios = [a / b for a, b in zip(figures["with"], figures["without"], strict=True)]
    sides = [repeated(f"{name} connector", values, None, "s") for name, values in figures.items()]
    rows = [Row("engine start to /health", [*sides, repeated("with / without connector", ratios, None)], {"seconds": figures})]
    print_table(rows, "engine start")
    if arguments.json:
        write_json(rows, arguments.json, "engine_start")


if __name__ == "__main__":
    main()
