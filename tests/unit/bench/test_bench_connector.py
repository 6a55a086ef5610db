"""The benchmark of the connector runs and writes what it measured; no figure is asserted, except hit rates, which are no timings."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.connector import simulation, trace
from bench.connector.misses import Misses, OtherHit, medians, pairs, ratio
from bench.report import Figure
from hack.engine_api import EngineError

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def _no_trace_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EPOCHKV_TRACE", raising=False)


def bench(*args: str) -> subprocess.CompletedProcess[str]:
    """`python -m bench.connector`, as `make bench-connector` runs it."""
    command = [sys.executable, "-m", "bench.connector", *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_a_cheap_row_writes_json_and_a_table(tmp_path: Path) -> None:
    out = tmp_path / "sub" / "figures.json"
    done = bench("bookkeeping", "--repeats", "1", "--json", str(out))
    assert done.returncode == 0, done.stderr
    written = json.loads(out.read_text())
    assert written["benchmark"] == "connector"
    assert written["machine"]["cpus"] >= 1
    (row,) = written["rows"]
    assert len(row["figures"]) == 4
    for figure in row["figures"]:
        low, high = figure["spread"]
        assert 0 < low <= figure["value"] <= high
        assert figure["met"] is (figure["value"] <= figure["aim"])
    assert "plan + commit, 4096 tokens (255 blocks)" in done.stdout
    assert "1 of 1 rows measured" in done.stdout
    assert "min left in all" in done.stderr


def test_a_row_that_cannot_be_measured_is_said_and_fails_the_run(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    done = bench("hit-rates", "--trace", str(tmp_path / "absent.jsonl"), "--json", str(out))
    assert done.returncode == 1
    assert "absent.jsonl" in done.stderr
    assert "0 of 1 rows measured" in done.stdout
    assert json.loads(out.read_text())["rows"] == []


def test_simulated_engines_find_what_a_hand_counted_trace_shares() -> None:
    # Turns alternate between two engines. Counted by hand: engine 0 sees requests 0, 2, 4, engine 1 sees 1, 3.
    prompts = ((0, 1, 2), (0, 1, 2, 3), (0, 1, 5), (0, 1, 2, 3, 4), (0, 6))
    chats = trace.Trace([trace.Request(blocks, 1) for blocks in prompts], "by hand", False)
    assert simulation.hit_rate(chats, 2, 100, shared=False) == (0 + 0 + 2 + 4 + 1) / 17
    assert simulation.hit_rate(chats, 2, 100, shared=True) == (0 + 3 + 2 + 4 + 1) / 17
    assert simulation.hit_rate(chats, 1, 100, shared=False) == (0 + 3 + 2 + 4 + 1) / 17


def test_a_trace_is_read_plain_and_gzipped_and_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ['{"timestamp": 0, "input_length": 700, "output_length": 9, "hash_ids": [0, 7]}\n'] * 3
    plain, packed = tmp_path / "t.jsonl", tmp_path / "t.jsonl.gz"
    plain.write_text("".join(lines))
    packed.write_bytes(gzip.compress("".join(lines).encode()))
    for path in (plain, packed):
        read = trace.load(path)
        assert list(read.requests) == [trace.Request((0, 7), 9)] * 3
        assert read.source == path.name
        assert not read.real, "known answers are those of the whole published trace"
    assert len(trace.load(plain, 2).requests) == 2
    monkeypatch.setenv("EPOCHKV_TRACE", str(plain))
    assert trace.load(None).source == "t.jsonl"
    plain.write_text("{}\n")
    with pytest.raises(ValueError, match=r"t\.jsonl is not a trace"):
        trace.load(None)


def test_an_aim_is_an_upper_bound_unless_it_says_otherwise() -> None:
    assert Figure("a ratio", 0.9, 0.9, "").met
    assert not Figure("a ratio", 0.91, 0.9, "").met
    assert Figure("throughput", 0.9, 0.9, "", at_least=True).met
    assert Figure("throughput", 0.89, 0.9, "", at_least=True).verdict == "missed"
    assert Figure("no aim", 1.0, None).verdict == ""


@pytest.mark.parametrize("error", [EngineError("ours: no answer: TimeoutError()"), TimeoutError("too late"), OtherHit("from elsewhere")])
def test_an_answer_that_does_not_come_is_a_miss_and_said(error: Exception) -> None:
    said: list[str] = []
    misses = Misses(said.append)

    def fail() -> float:
        raise error

    assert misses.attempt("ours", lambda: 0.5) == 0.5
    assert misses.attempt("ours", fail) is None
    assert misses.attempt("stock", lambda: 0.0) == 0.0
    assert said == [f"    a miss of ours: {error}"]
    assert [(figure.name, figure.value) for figure in misses.figures()] == [("misses of ours, of 2", 1), ("misses of stock, of 1", 0)]


def test_a_turn_with_a_miss_gives_no_ratio_and_the_others_do() -> None:
    ours, stock = [1.0, None, 3.0, 4.0], [2.0, 2.0, None, 2.0]
    (figure,) = ratio("ours / stock", pairs(ours, stock), 0.9)
    assert figure.value == (0.5 + 2.0) / 2
    assert figure.spread == (0.5, 2.0)
    assert ratio("ours / stock", pairs([None], [1.0]), 0.9) == []
    assert [(figure.name, figure.value) for figure in medians({"ours": ours, "never": [None]}, "s")] == [("ours", 3.0)]
    with pytest.raises(ValueError, match="zip"):
        pairs([1.0], [])
