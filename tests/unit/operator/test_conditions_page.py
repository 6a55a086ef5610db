"""The reference page of conditions has every type and reason that the operator writes, with its status, and no other."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from epochkv_fence.protocol.messages import TIER_REASONS

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/reference/conditions.md"
PLANNING = ROOT / "operator/epochkv_operator/planning"
REASON = re.compile(r"[A-Z][a-z]+([A-Z][a-z]+)*")
CONTROL = ROOT / "operator/epochkv_operator/control"
PROBLEMS = {"SecretConflict", "SecretRefused", "PoolNotReady", "WaitingForPool"}
"""Reasons of `Ready` that `control` finds."""
SHARING = set(re.findall(r'Problem\("(\w+)"', (CONTROL / "joining.py").read_text())) | {"Forbidden", "WriteFailed"}
"""Reasons of `NamespacesAllowed` that `control` finds."""


def rows(section: str, cells: int) -> list[list[str]]:
    """Cells of the table with so many columns in one section of the page."""
    text = PAGE.read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    split = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line.startswith("| ")]
    return [row for row in split if len(row) == cells]


def names(cell: str) -> list[str]:
    return re.findall(r"`([A-Z]\w+)`", cell)


def texts(node: ast.AST | None) -> Iterator[str]:
    """Strings that an expression may be."""
    if isinstance(node, ast.IfExp):
        yield from (*texts(node.body), *texts(node.orelse))
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value


def calls(module: str, name: str) -> Iterator[ast.Call]:
    for node in ast.walk(ast.parse((PLANNING / module).read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
            yield node


def test_every_reason_is_on_the_page_with_its_status() -> None:
    written = {
        (reason, status) for call in calls("conditions.py", "Condition") for status in texts(call.args[1]) for reason in texts(call.args[2])
    }
    assert len(written) > 20
    table = [row for section in ("Pools", "Engines") for row in rows(section, 4)]
    page = {(reason, status) for reasons, _, status, _ in table for reason in names(reasons) if reason not in PROBLEMS}
    assert len(SHARING) == 7
    assert page == written | {(reason, "False") for reason in (*TIER_REASONS, *SHARING)}


def test_every_type_is_on_the_page() -> None:
    source = (PLANNING / "conditions.py").read_text()
    kinds = set(re.findall(r'kind(?:, \w+)? = "(\w+)"|_workload_condition\("(\w+)"|Condition\("(\w+)"', source))
    listed = {kind for section in ("Pools", "Engines") for row in rows(section, 2) for kind in names(row[0])}
    assert listed == {kind for found in kinds for kind in found if kind}


def test_every_reason_of_a_workload_is_on_the_page() -> None:
    """First parts of the pairs (reason, message), and reasons of `Health` where it is made."""
    tuples = [node for node in ast.walk(ast.parse((PLANNING / "workload.py").read_text())) if isinstance(node, ast.Tuple)]
    pairs = [node.elts[0] for node in tuples if len(node.elts) == 2]
    made = [call.args[4] for call in calls("workload.py", "Health") if len(call.args) > 4]
    found = {text for node in (*pairs, *made) for text in texts(node) if REASON.fullmatch(text)}
    assert {reason for row in rows("Workloads", 3) for reason in names(row[0])} == found


def test_every_event_is_on_the_page() -> None:
    """Those that no condition brings: their reasons are strings, with two capitals, where they are told."""
    files = (*CONTROL.glob("*.py"), CONTROL.parent / "keys.py")
    told = {name for path in files for name in re.findall(r'(?:tell|emit)\(.*?"([A-Z][a-z]+[A-Z]\w+)"', path.read_text())}
    assert len(told) > 5
    assert {reason for row in rows("Events", 2) for reason in names(row[0])} == told
