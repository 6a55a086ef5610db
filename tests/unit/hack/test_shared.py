"""What tools, benchmarks and tests share: waiting with a deadline, ports, durations that survive."""

from __future__ import annotations

from pathlib import Path

from hack.durations import Durations, clock


def test_durations_survive_and_nonsense_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "cache/durations.json"
    durations = Durations(path)
    assert durations.expected("cluster", 30) == 30
    durations.record("cluster", 12.34)
    assert Durations(path).expected("cluster", 30) == 12.3
    path.write_text("[1, 2")
    assert Durations(path).expected("cluster", 30) == 30
    assert clock(65.9) == "1:05"


def test_what_never_ran_here_is_expected_at_the_pace_of_this_run(tmp_path: Path) -> None:
    durations = Durations(tmp_path / "durations.json")
    for name, default, seconds in (("slow", 10.0, 30.0), ("found done", 100.0, 0.1), ("slower", 10.0, 40.0), ("as told", 10.0, 10.0)):
        durations.expected(name, default)
        durations.record(name, seconds)
    assert durations.expected("next", 20.0) == 60.0
    assert durations.expected("slow", 10.0) == 30.0, "what ran here counts"
    assert Durations(tmp_path / "durations.json").expected("next", 20.0) == 20.0, "another run has a pace of its own"
