"""The reference page of conditions has every type and reason that the operator writes, with its status, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/reference/conditions.md"
MESSAGES = ROOT / "fence/epochkv_fence/protocol/messages.py"
PLANNING = ROOT / "operator/epochkv_operator/planning"
REASON = re.compile(r"[A-Z][a-z]+([A-Z][a-z]+)*")

Row = tuple[str, str, str]
"""Type, reason, status."""


def rows(section: str) -> list[list[str]]:
    """Cells of the tables in one section of the page."""
    text = PAGE.read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def names(cell: str) -> list[str]:
    return re.findall(r"`([A-Z]\w+)`", cell)


def explained(section: str) -> set[Row]:
    return {
        (kind, reason, status) for reasons, kinds, status, _ in (row for row in rows(section) if len(row) == 4)
        for reason in names(reasons) for kind in names(kinds)
    }  # fmt: skip


def listed_types(section: str) -> set[str]:
    return {kind for row in rows(section) if len(row) == 2 for kind in names(row[0])}


def tree(module: str) -> ast.Module:
    return ast.parse((PLANNING / module).read_text())


def text_of(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def kind_of(function: ast.FunctionDef) -> str | None:
    """What the function calls `kind`."""
    for node in ast.walk(function):
        if not isinstance(node, ast.Assign):
            continue
        target, value = node.targets[0], node.value
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            target, value = target.elts[0], value.elts[0]
        if isinstance(target, ast.Name) and target.id == "kind":
            return text_of(value)
    return None


def written() -> Iterator[Row]:
    """Conditions of `conditions.py` whose reason is written there; those of workloads and problems come from elsewhere."""
    for function in (node for node in ast.walk(tree("conditions.py")) if isinstance(node, ast.FunctionDef)):
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Condition":
                kind = text_of(node.args[0]) or kind_of(function)
                status, reason = text_of(node.args[1]), text_of(node.args[2])
                if kind is not None and status is not None and reason is not None:
                    yield kind, reason, status


def why_tiers_are_off() -> Iterator[Row]:
    """Engines say these reasons themselves."""
    for node in ast.walk(ast.parse(MESSAGES.read_text())):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "TierReason":
            assert isinstance(node.value, ast.Subscript)
            assert isinstance(node.value.slice, ast.Tuple)
            yield from (("TiersUsable", reason, "False") for part in node.value.slice.elts if (reason := text_of(part)) is not None)


def workload_reasons() -> set[str]:
    """First parts of the pairs (reason, message), and reasons of `Health` where it is made."""
    found: list[ast.expr] = []
    for node in ast.walk(tree("workload.py")):
        if isinstance(node, ast.Tuple) and len(node.elts) == 2:
            found.append(node.elts[0])
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Health" and len(node.args) > 4:
            reason = node.args[4]
            found += [reason.body, reason.orelse] if isinstance(reason, ast.IfExp) else [reason]
    return {text for node in found if (text := text_of(node)) is not None and REASON.fullmatch(text)}


PROBLEMS = {"SecretConflict", "SecretRefused", "PoolNotReady", "WaitingForPool"}
"""Reasons of `Ready` that `control` finds."""


def test_every_reason_is_on_the_page_with_its_type_and_status() -> None:
    found = set(written())
    assert len(found) > 20
    page = explained("Pools") | explained("Engines")
    limited = set(why_tiers_are_off())
    assert len(limited) > 3
    assert {row for row in page if row[1] not in PROBLEMS} == found | limited


def test_every_type_is_on_the_page() -> None:
    workloads = {"MasterAvailable", "StoreAvailable", "Available"}
    assert listed_types("Pools") | listed_types("Engines") == {kind for kind, _, _ in written()} | workloads


def test_every_reason_of_a_workload_is_on_the_page() -> None:
    found = workload_reasons()
    assert len(found) > 5
    assert {reason for row in rows("Workloads") for reason in names(row[0])} == found
