"""Count what a reader of this repository has to carry: lines, and what stands over the bounds of CONTRIBUTING.md.

It reads the sources as text and imports none of them, so that it describes this checkout, whatever is installed.
The exit status is 1 when modules import each other in a circle, and 0 otherwise.

    python -m hack.census        a table, and what must be 0
    python -m hack.census -v     every place over a bound, too
"""

from __future__ import annotations

import argparse
import ast
import builtins
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
PARTS = {
    "fence": ("fence",),
    "connector": ("connector",),
    "operator": ("operator",),
    "hack+bench": ("hack", "bench"),
    "tests": ("tests",),
}
"""Name of a part -> its folders."""
INSTALLED = {"fence", "connector", "operator"}
"""Folders that are on Python's path: the first folder of a file is not part of its module's name."""
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 50
MAX_METHODS = 20
MAX_MODULES = 12
MAX_DEPTH = 1
"""Of a class below other classes of ours. Exceptions, and levels that only declare a Protocol, do not count."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """One file: `path` from the root of the repository, its dotted `name`, and its text, parsed."""

    path: PurePosixPath
    name: str
    num_lines: int
    tree: ast.Module

    @property
    def part(self) -> str:
        return next(part for part, folders in PARTS.items() if self.path.parts[0] in folders)


@dataclass(frozen=True)
class Finding:
    """One place over a bound."""

    part: str
    kind: str
    place: str
    size: int


def source(path: PurePosixPath, text: str) -> Source:
    parts = path.with_suffix("").parts[1 if path.parts[0] in INSTALLED else 0 :]
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return Source(path, name, len(text.splitlines()), ast.parse(text))


def findings(sources: Sequence[Source]) -> list[Finding]:
    """Everything over a bound, apart from circles."""
    depths = Classes(sources).depths()
    return [found for each in sources for found in _of_file(each, depths)] + list(_crowded(sources))


def _of_file(file: Source, depths: Mapping[str, int]) -> Iterator[Finding]:
    if file.num_lines > MAX_FILE_LINES:
        yield Finding(file.part, "files", str(file.path), file.num_lines)
    for node in ast.walk(file.tree):
        if isinstance(node, Function):
            size = (node.end_lineno or node.lineno) - node.lineno + 1
            if size > MAX_FUNCTION_LINES:
                yield Finding(file.part, "functions", f"{file.path}:{node.lineno} {node.name}", size)
        elif isinstance(node, ast.ClassDef):
            place = f"{file.path}:{node.lineno} {node.name}"
            methods = sum(isinstance(child, Function) for child in node.body)
            if methods > MAX_METHODS:
                yield Finding(file.part, "classes", place, methods)
            if (depth := depths.get(f"{file.name}.{node.name}", 0)) > MAX_DEPTH:
                yield Finding(file.part, "inheritance", place, depth)


def _crowded(sources: Sequence[Source]) -> Iterator[Finding]:
    """Folders with too many modules to overlook. Test files are found by what they test, so they do not count."""
    modules = [file for file in sources if file.path.name != "__init__.py" and not file.path.name.startswith("test_")]
    parts = {file.path.parent: file.part for file in modules}
    for folder, number in Counter(file.path.parent for file in modules).items():
        if number > MAX_MODULES:
            yield Finding(parts[folder], "packages", str(folder), number)


def circles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Circles of a graph (node -> nodes that it needs), each closed by its first node again. Empty: there is none.

    Every circle is broken where it closes before the next one is looked for; one that shares that edge is not listed.
    """
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


def imports(sources: Sequence[Source]) -> dict[str, set[str]]:
    """Module -> modules of ours that it imports, at its top or late in a function; not what only type checkers import."""
    names = {file.name for file in sources}
    graph = {}
    for file in sources:
        wanted: set[str] = set()
        for node in _at_run_time(file.tree):
            if isinstance(node, ast.Import):
                wanted.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                below = {f"{node.module}.{alias.name}" for alias in node.names}
                wanted.update(name if name in names else node.module for name in below)
        graph[file.name] = wanted & names - {file.name}
    return graph


def _at_run_time(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below this one, without the bodies of `if TYPE_CHECKING:`."""
    yield node
    hidden = node.body if isinstance(node, ast.If) and _dotted(node.test).endswith("TYPE_CHECKING") else []
    for child in ast.iter_child_nodes(node):
        if child not in hidden:
            yield from _at_run_time(child)


class Classes:
    """Our classes by their full name, and what they inherit from."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._bases: dict[str, list[str]] = {}
        self._imported: dict[str, str] = {}
        for file in sources:
            here = f"{file.name}."
            for node in ast.walk(file.tree):
                if isinstance(node, ast.ClassDef):
                    self._bases[here + node.name] = [here + name for base in node.bases if (name := _dotted(base))]
                elif isinstance(node, ast.ImportFrom):
                    self._imported.update({here + (alias.asname or alias.name): f"{node.module}.{alias.name}" for alias in node.names})
                elif isinstance(node, ast.Import):
                    self._imported.update({here + alias.asname: alias.name for alias in node.names if alias.asname})

    def depths(self) -> dict[str, int]:
        """Class -> how many levels of our own classes stand above it."""
        return {name: self._depth(name) for name in self._bases if not self._is_exception(name)}

    def _above(self, name: str) -> list[str]:
        return [self._resolve(base) for base in self._bases.get(name, ())]

    def _depth(self, name: str) -> int:
        ours = [base for base in self._above(name) if base in self._bases and not self._is_protocol(base)]
        return max((self._depth(base) + 1 for base in ours), default=0)

    def _is_protocol(self, name: str) -> bool:
        return any(base.rpartition(".")[2] == "Protocol" for base in self._above(name))

    def _is_exception(self, name: str) -> bool:
        if name in self._bases:
            return any(self._is_exception(base) for base in self._above(name))
        last = name.rpartition(".")[2]
        kind = getattr(builtins, last, None)
        return last.endswith(("Error", "Exception")) or (isinstance(kind, type) and issubclass(kind, BaseException))

    def _resolve(self, name: str) -> str:
        """Follow imports to where the class is written, also through `__init__` files that pass it on."""
        for _ in range(10):  # more than any name is passed on
            head = next((head for head in (name, name.rpartition(".")[0]) if head in self._imported), "")
            if name in self._bases or not head:
                break
            name = self._imported[head] + name.removeprefix(head)
        return name


def _dotted(node: ast.expr) -> str:
    """`a.b.C` of a base class, `C` of `C[int]`; empty for anything else."""
    if isinstance(node, ast.Subscript):
        return _dotted(node.value)
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (left := _dotted(node.value)):
        return f"{left}.{node.attr}"
    return ""


KINDS = {
    "files": f"files over {MAX_FILE_LINES} lines",
    "functions": f"functions over {MAX_FUNCTION_LINES} lines",
    "classes": f"classes over {MAX_METHODS} methods",
    "packages": f"packages over {MAX_MODULES} modules",
    "inheritance": "classes more than one level below another of ours",
}


def table(sources: Sequence[Source], found: Sequence[Finding]) -> Iterator[str]:
    """Lines of the report: a row a part, a column a bound."""
    counts = Counter((finding.part, finding.kind) for finding in found)
    yield f"{'':12}{'lines':>8}{'files':>7}   over the bounds: {'  '.join(f'{kind:>11}' for kind in KINDS)}"
    for part in (*PARTS, "all"):
        members = [file for file in sources if part in (file.part, "all")]
        over = "  ".join(f"{sum(n for (of, what), n in counts.items() if what == kind and part in (of, 'all')):>11}" for kind in KINDS)
        yield f"{part:12}{sum(file.num_lines for file in members):>8,}{len(members):>7}{'':20}{over}"


def listing(found: Sequence[Finding]) -> Iterator[str]:
    """Every place over a bound, the largest first."""
    for kind, title in KINDS.items():
        places = sorted((finding for finding in found if finding.kind == kind), key=lambda finding: -finding.size)
        yield f"\n{title}: {len(places)}"
        yield from (f"  {finding.size:>5}  {finding.place}" for finding in places)


def read(root: Path) -> list[Source]:
    """Every Python file of the parts."""
    folders = [root / folder for folders in PARTS.values() for folder in folders]
    paths = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    return [source(PurePosixPath(path.relative_to(root)), path.read_text()) for path in paths]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m hack.census", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="list every place over a bound")
    verbose = parser.parse_args(argv).verbose
    sources = read(ROOT)
    found = findings(sources)
    print("\n".join(table(sources, found)))
    if verbose:
        print("\n".join(listing(found)) + "\n")
    circular = circles(imports(sources))
    print(f"import circles between modules: {len(circular)}")
    for circle in circular:
        print(f"  {' -> '.join(circle)}")
    return 1 if circular else 0


if __name__ == "__main__":
    sys.exit(main())
