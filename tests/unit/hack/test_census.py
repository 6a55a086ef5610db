"""The census, on sources that are over each bound by one and on ones that are not."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path, PurePosixPath

import pytest

from hack.census import KINDS, PARTS, Source, circles, findings, imports, read, source, table


def made(**files: str) -> list[Source]:
    """`fence__epochkv_fence__x` -> fence/epochkv_fence/x.py."""
    return [source(PurePosixPath(name.replace("__", "/") + ".py"), text) for name, text in files.items()]


def over(*sources: Source) -> list[tuple[str, str, int]]:
    return [(found.kind, found.place, found.size) for found in findings(sources)]


def lines(number: int) -> str:
    return "x = 1\n" * number


def function(name: str, num_lines: int) -> str:
    return f"def {name}():\n" + "    x = 1\n" * (num_lines - 1)


def test_a_file_is_named_by_its_part_and_its_module() -> None:
    init = source(PurePosixPath("fence/epochkv_fence/hub/__init__.py"), "")
    assert [(file.part, file.name) for file in (*made(bench__fence__rows="", connector__a__b=""), init)] == [
        ("hack+bench", "bench.fence.rows"),
        ("connector", "a.b"),
        ("fence", "epochkv_fence.hub"),
    ]


def test_what_is_at_a_bound_is_not_over_it() -> None:
    assert over(*made(hack__a=lines(400), hack__b=lines(401))) == [("files", "hack/b.py", 401)]
    assert over(*made(hack__a=function("f", 50) + "async " + function("g", 51))) == [("functions", "hack/a.py:51 g", 51)]
    classes = [f"class {name}:\n" + "".join(f"    def m{i}(self): ...\n" for i in range(size)) for name, size in (("A", 20), ("B", 21))]
    assert over(*made(hack__a="".join(classes))) == [("classes", "hack/a.py:22 B", 21)]


def test_test_files_and_inits_do_not_crowd_a_folder() -> None:
    full = {f"tests__support__m{i}": "" for i in range(12)} | {f"tests__support__test_{i}": "" for i in range(9)}
    sources = [*made(**full), source(PurePosixPath("tests/support/__init__.py"), "")]
    assert over(*sources) == []
    assert over(*sources, *made(tests__support__m12="")) == [("packages", "tests/support", 13)]


BASE = "import abc\nfrom typing import Protocol\nclass Base(abc.ABC): ...\nclass Reads(Protocol): ...\nclass BadInput(ValueError): ...\n"


@pytest.mark.parametrize(
    ("text", "deep"),
    [
        ("from hack.base import Base\nclass One(Base): ...\n", []),
        ("from hack.base import Base\nclass One(Base): ...\nclass Two(One): ...\nclass Three(Two): ...\n", [("Two", 2), ("Three", 3)]),
        ("from hack import base as b\nclass One(b.Base): ...\nclass Two(One): ...\n", [("Two", 2)]),
        ("from hack.passed_on import Root\nclass One(Root[int]): ...\nclass Two(One): ...\n", [("Two", 2)]),
        ("from hack.base import Reads\nclass One(Reads): ...\nclass Two(One): ...\n", []),
        ("from hack.base import BadInput\nclass One(BadInput): ...\nclass Two(One): ...\n", []),
        ("from zmq import ZMQError\nclass One(ZMQError): ...\nclass Two(One): ...\nclass Three(Two): ...\n", []),
    ],
)
def test_levels_of_our_own_classes_count_apart_from_exceptions_and_protocols(text: str, deep: list[tuple[str, int]]) -> None:
    found = over(*made(hack__base=BASE, hack__passed_on="from hack.base import Base as Root\n", hack__a=text))
    assert [(kind, place.split()[1], size) for kind, place, size in found] == [("inheritance", name, depth) for name, depth in deep]


def test_imports_count_wherever_they_stand_but_not_for_type_checkers_alone() -> None:
    late = "def f():\n    from hack import b\n"
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import hack.a\nelse:\n    import hack.c\n"
    graph = imports(made(hack__a=f"import json\n{late}", hack__b=typed, hack__c="from hack.a import f\n"))
    assert graph == {"hack.a": {"hack.b"}, "hack.b": {"hack.c"}, "hack.c": {"hack.a"}}
    (circle,) = circles(graph)
    assert circle[0] == circle[-1]
    assert all(needed in graph[module] for module, needed in pairwise(circle))


def test_every_circle_is_found_once_and_a_tree_has_none() -> None:
    two = circles({"a": ["b"], "b": ["a"], "c": ["d"], "d": ["c"], "e": ["a"]})
    assert sorted(sorted(set(circle)) for circle in two) == [["a", "b"], ["c", "d"]]
    assert circles({"a": ["b", "c"], "b": ["c"], "c": []}) == []


def test_the_table_adds_the_parts_up() -> None:
    sources = made(fence__a=lines(401), bench__b=function("f", 51), hack__c=lines(3))
    header, *rows = (line.split() for line in table(sources, findings(sources)))
    assert header[-5:] == list(KINDS)
    assert {row[0]: row[1:] for row in rows}["all"] == ["455", "3", "1", "1", "0", "0", "0"]
    assert [row[0] for row in rows] == [*PARTS, "all"]


def test_it_reads_the_python_files_of_every_part(tmp_path: Path) -> None:
    for name in ("fence/epochkv_fence/hub/__init__.py", "hack/run.py", "hack/setup.sh", "docs/conf.py", "tests/unit/test_it.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    assert [file.name for file in read(tmp_path)] == ["epochkv_fence.hub", "hack.run", "tests.unit.test_it"]
