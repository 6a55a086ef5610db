"""The benchmark of the connector runs and writes what it measured; no figure is asserted, except hit rates, which are no timings."""

import json
import subprocess
import sys
from pathlib import Path

from bench.connector import simulation, trace

ROOT = Path(__file__).resolve().parents[3]


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
