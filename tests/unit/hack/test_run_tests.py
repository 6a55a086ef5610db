"""Which failed tests have a second run: those of real processes, a few at most, and no wrong answer."""

import sys
from pathlib import Path

import pytest

from hack import run_tests
from hack.run_tests import LAYERS, MAX_SECOND_RUNS, ROOT, Layer, Run, read_line, run_layer

FLAKY = """
import pytest
from pathlib import Path

@pytest.mark.parametrize("what", ["a slow one"])
def test_flaky(what):
    seen = Path(__file__).with_suffix(".seen")
    if not seen.exists():
        seen.touch()
        assert "late" == "in time"

@pytest.mark.slow
def test_broken():
    assert 1 == 2
"""


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, *extra: str) -> Run:
    monkeypatch.setattr(run_tests, "ROOT", folder)
    (folder / "test_it.py").write_text(FLAKY)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    layer = Layer("layer", Path(sys.executable), ("test_it.py",), 1, real=True)
    return run_layer(layer, ["-p", "no:cacheprovider", *extra], sys.stdout.buffer)


def test_one_that_fails_once_passes_and_is_named_and_one_that_fails_twice_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(tmp_path, monkeypatch, "-m", "not slow")
    assert found.status == 0
    assert found.summary.startswith("1 failed, 1 deselected")
    assert found.summary.endswith("; passed on a second run: test_it.py::test_flaky[a slow one]")
    assert run(tmp_path, monkeypatch, "-k", "broken").status == 1


@pytest.mark.parametrize(
    ("report", "again"),
    [
        (">       assert cached == 896\nE       assert 0 == 896", True),
        (">       assert tokens == [2]\nE       assert [1] == [2]", False),
        ("E       AssertionError: A gave a wrong answer", False),
        ("\n".join(f"FAILED test_it.py::test_{number} - x" for number in range(MAX_SECOND_RUNS)), False),
        ("ERROR    root:test_it.py:9 a line of a captured log", True),
    ],
)
def test_a_wrong_answer_and_many_failures_are_final(report: str, again: bool) -> None:
    found = Run(1, "")
    for line in f"{report}\nFAILED test_it.py::test_it - assert 0".splitlines():
        read_line(line.encode(), found)
    assert found.may_be_the_machine is again


def test_every_path_that_a_layer_names_is_there_and_every_folder_is_named() -> None:
    assert [path for layer in LAYERS for path in (*layer.paths, *layer.without) if not [*ROOT.glob(path)]] == []
    assert run_tests.forgotten() == []
