"""Which failed tests have a second run: those of real processes, a few at most, and no wrong answer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hack import run_tests
from hack.durations import Durations
from hack.run_tests import LAYERS, MAX_SECOND_RUNS, ROOT, Layer, Run, run_all, run_layer

FLAKY = """
import logging
import pytest
from pathlib import Path

def test_good():
    pass

@pytest.mark.parametrize("what", ["a slow one"])
def test_flaky(what):
    seen = Path(__file__).with_suffix(".seen")
    if not seen.exists():
        seen.touch()
        logging.error("a line of the captured log")
        assert "late" == "in time"
"""
MISS = """
from pathlib import Path

def test_miss():
    cached, tokens = 0, [1]
    assert tokens == [1], "a wrong answer"
    seen = Path(__file__).with_suffix(".seen")
    missed = not seen.exists()
    seen.touch()
    assert cached == (896 if missed else 0)
"""
BROKEN = "def test_broken():\n    assert 1 == 2\n"
WRONG = "def test_wrong():\n    tokens = [1]\n    assert tokens == [2]\n"
MESSAGE = "def test_wrong():\n    assert 0 == 1, 'A gave a wrong answer'\n"
MANY = f"import pytest\n@pytest.mark.parametrize('n', range({MAX_SECOND_RUNS + 1}))\ndef test_broken(n):\n    assert False\n"


def run(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch, real: bool = True, slow: bool = True) -> Run:
    monkeypatch.setattr(run_tests, "ROOT", folder)
    (folder / "test_it.py").write_text(text)
    extra = ["-p", "no:cacheprovider", *(() if slow else ("-m", "not slow"))]
    return run_layer(Layer("layer", Path(sys.executable), ("test_it.py",), 1, real=real), extra, sys.stdout.buffer)


def test_one_that_fails_once_passes_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    found = run(FLAKY, tmp_path, monkeypatch)
    assert found.status == 0
    assert found.summary.startswith("1 failed, 1 passed")
    assert found.summary.endswith("; passed on a second run: test_it.py::test_flaky[a slow one]")
    assert "once more test_it.py::test_flaky[a slow one]" in capfd.readouterr().out


def test_a_miss_below_a_right_answer_has_a_second_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(MISS, tmp_path, monkeypatch).status == 0


def test_one_that_fails_twice_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(BROKEN, tmp_path, monkeypatch).status == 1
    assert "once more" in capfd.readouterr().out


@pytest.mark.parametrize(("text", "real"), [(WRONG, True), (MESSAGE, True), (MANY, True), (FLAKY, False), ("def test_(:", True)])
def test_wrong_answers_many_failures_and_pure_tests_have_one_run(
    text: str, real: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(text, tmp_path, monkeypatch, real).status != 0
    assert "once more" not in capfd.readouterr().out


def test_what_another_layer_runs_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(run_tests, "ROOT", tmp_path)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_it.py").write_text("def test_good():\n    pass\n")
    (tmp_path / "tests/test_other.py").write_text(BROKEN)
    layer = Layer("layer", Path(sys.executable), ("tests",), 1, without=("tests/test_other.py",))
    found = run_layer(layer, ["-p", "no:cacheprovider"], sys.stdout.buffer)
    assert (found.status, found.summary.split(" in ")[0]) == (0, "1 passed")
    capfd.readouterr()


def test_slow_tests_are_left_out_and_a_layer_of_them_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marked = f"import pytest\n@pytest.mark.slow\n{BROKEN}"
    assert run(marked, tmp_path, monkeypatch).status == 1
    found = run(marked, tmp_path, monkeypatch, slow=False)
    assert found.status == 0
    assert found.summary.startswith("1 deselected")


def test_every_path_that_a_layer_names_is_there() -> None:
    assert [path for layer in LAYERS for path in (*layer.paths, *layer.without) if not [*ROOT.glob(path)]] == []


def test_a_layer_beside_the_others_is_told_last_and_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.setattr(run_tests, "ROOT", tmp_path)
    priority = "def test_priority():\n    import os\n    assert os.nice(0) == 19\n"
    (tmp_path / "test_aside.py").write_text(f"{priority}\n{BROKEN}")
    (tmp_path / "test_it.py").write_text("def test_good():\n    pass\n")
    pure = Layer("pure", Path(sys.executable), ("test_aside.py",), 1, beside=True)
    other = Layer("other", Path(sys.executable), ("test_it.py",), 1000)
    found = run_all([pure, other], ["-p", "no:cacheprovider"], Durations(tmp_path / "durations.json"))
    assert [(name, run.status, run.failed) for name, run in found.items()] == [
        ("pure", 1, ["test_aside.py::test_broken"]),
        ("other", 0, []),
    ]
    printed = capfdbinary.readouterr().out.decode()
    assert printed.index("test_it.py") < printed.index("test_aside.py")
    assert Durations(tmp_path / "durations.json").expected("other", other.seconds) != other.seconds
    assert Durations(tmp_path / "durations.json").expected("pure", pure.seconds) == pure.seconds
