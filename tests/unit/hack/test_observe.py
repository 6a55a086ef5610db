"""Boards and the metrics' page: what the table of metrics lacks cannot be asked for."""

import re

import pytest

from hack.observe import __main__ as command
from hack.observe.catalog import catalog
from hack.observe.queries import check
from hack.observe.reference import PAGE, ROOT

KNOWN = catalog()


def test_lint_fails_when_a_metric_is_renamed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["observe", "--check"])
    without = {name: metric for name, metric in KNOWN.items() if name != "vllm:epochkv_bypass"}
    monkeypatch.setattr(command, "catalog", lambda: without)
    assert command.main() == 1
    assert "asks for vllm:epochkv_bypass, which nothing serves" in capsys.readouterr().err


def test_queries_of_the_documentation_ask_for_what_exists() -> None:
    asked = [cell for line in (ROOT / PAGE).read_text().splitlines() if line.count("|") == 3 for cell in re.findall(r"\| `(.+)` \|$", line)]
    queries = [text for text in asked if re.search(r"==|rate|increase", text)]
    assert len(queries) >= 7
    for query in queries:
        check(query, KNOWN)
