"""Lines by package, and circles of imports in what we ship, those for type checkers alone included. A circle fails `make lint`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ("fence", "connector", "operator")
PARTS = {"product": SHIPPED, **{name: (name,) for name in (*SHIPPED, "hack", "bench", "tests")}}


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Circles of a graph (node -> nodes that it needs). Each is broken where it closes before the next one is looked for."""
    needs, found = {node: set(needed) for node, needed in graph.items()}, []
    while True:
        try:
            TopologicalSorter(needs).prepare()
        except CycleError as error:
            circle = error.args[1][::-1]
            needs[circle[-2]].discard(circle[-1])
            found.append(circle)
        else:
            return found


def main() -> int:
    for part, folders in PARTS.items():
        files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
        print(f"{part:10} {sum(len(path.read_text().splitlines()) for path in files):>7,} lines in {len(files):>4} files")
    graph = grimp.build_graph(*(f"epochkv_{name}" for name in SHIPPED), cache_dir=None)
    found = circles({module: graph.find_modules_directly_imported_by(module) for module in graph.modules})
    print("\n".join([f"import circles: {len(found)}", *(f"  {' -> '.join(circle)}" for circle in found)]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
