"""The table of rules for auditors names things that exist, and every mutant."""

import ast
import functools
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.model.mutants import ALL_MUTANTS, RARE_MUTANTS

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs/reference/fence-rules.md"
ROW = re.compile(r"^\| (?P<rule>.+?) \| `(?P<where>[^`]+)` \| (?P<test>.+?) \| (?P<mutant>.+?) \|$")
NO_MUTANT = "none: "


class Rule(NamedTuple):
    rule: str
    where: str
    test: str
    mutant: str


def rules() -> list[Rule]:
    return [Rule(*match.group("rule", "where", "test", "mutant")) for line in PAGE.read_text().splitlines() if (match := ROW.match(line))]


@functools.cache
def names(path: Path) -> set[str]:
    """Everything a module defines: functions, classes, and `Class.member`."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            members = (member.name for member in node.body if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef))
            found |= {f"{node.name}.{member}" for member in members}
    return found


def module(name: str) -> Path:
    package, base = ("epochkv_fence", ROOT / "fence") if not name.startswith("epochkv_connector.") else ("", ROOT / "connector")
    return (base / package / name.replace(".", "/")).with_suffix(".py")


def test_no_row_of_the_table_is_overlooked() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and not line.startswith(("| rule ", "|---"))]
    assert len(rows) == len(rules()) > 80


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule.rule)
def test_what_a_rule_names_exists(rule: Rule) -> None:
    name, symbol = rule.where.split(":")
    assert symbol in names(module(name)), f"{rule.where} does not exist"
    if rule.test != "the mutant":
        path, test = rule.test.strip("`").split("::")
        assert test in names(ROOT / path), f"{rule.test} does not exist"
    assert rule.mutant in ALL_MUTANTS or (rule.mutant.startswith(NO_MUTANT) and rule.test != "the mutant"), f"no mutant {rule.mutant!r}"


def test_every_mutant_is_named_once() -> None:
    named = [rule.mutant for rule in rules() if not rule.mutant.startswith(NO_MUTANT)]
    assert sorted(named) == sorted(ALL_MUTANTS)


def test_mutants_that_are_rarely_caught_are_said_to_be() -> None:
    listed = PAGE.read_text().split("## Rarely caught")[1]
    for name in RARE_MUTANTS:
        assert f"- {name}\n" in listed, name
    assert listed.count("\n- ") == len(RARE_MUTANTS)
