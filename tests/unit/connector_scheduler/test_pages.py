"""The pages for auditors name tests and code that exist, and leave out no section of what they list."""

import re
from pathlib import Path

import pytest

from tests.unit.fence.test_rules_table import names

ROOT = Path(__file__).resolve().parents[3]
RULES = ROOT / "docs/reference/connector-rules.md"
DEFECTS = ROOT / "docs/reference/peers-defects.md"
TEST = re.compile(r"`([\w/]+\.py)::(test_\w+)`")
SYMBOL = re.compile(r"`([a-z_.]+):([\w.]+)`")


def rows(page: Path) -> list[str]:
    return [line for line in page.read_text().splitlines() if line.startswith("| ") and not line.startswith(("| rule ", "| defect "))]


def path_of(page: Path, path: str) -> Path:
    if path.startswith("tests/"):
        return ROOT / path
    return ROOT / ("tests/scheduler" if page == RULES else "tests") / path


@pytest.mark.parametrize("page", [RULES, DEFECTS], ids=lambda page: page.stem)
def test_every_row_names_a_test_that_exists(page: Path) -> None:
    assert len(rows(page)) > 45
    for row in rows(page):
        match = TEST.search(row.rsplit("|", 2)[1])
        assert match, f"no test: {row}"
        path = path_of(page, match[1])
        assert match[2] in names(path), f"{match[0]} does not exist"


def test_every_rule_names_code_that_exists() -> None:
    for row in rows(RULES):
        match = SYMBOL.search(row)
        assert match, f"no symbol: {row}"
        module = ROOT / "connector/epochkv_connector" / match[1].replace(".", "/")
        path = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
        assert match[2] in names(path), f"{match[0]} does not exist"


def test_no_rule_or_defect_stands_twice() -> None:
    for page in (RULES, DEFECTS):
        first = [row.split(" | ")[0] for row in rows(page)]
        assert len(set(first)) == len(first)
