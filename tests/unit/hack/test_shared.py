"""What tools, benchmarks and tests share: waiting with a deadline, ports, durations that survive."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from hack.durations import Durations, clock
from hack.loopback import free_ports, port_open
from hack.waiting import eventually, poll


def test_waiting_ends_with_the_first_true_result() -> None:
    results = iter([0, "", 7, 8])
    assert poll(lambda: next(results), 10.0, 0.0) == 7
    assert eventually(lambda: "there", "never said", 0.0) == "there"


def test_waiting_in_vain_ends_with_the_reason_of_its_end() -> None:
    seen: list[int] = []
    assert poll(lambda: seen.append(0) or [], 0.02, 0.001) == []
    assert len(seen) > 1
    with pytest.raises(TimeoutError, match=r"not within 0\.02 s: a block"):
        eventually(lambda: False, "a block", 0.02, 0.001)
    with pytest.raises(TimeoutError, match=f"{len(seen)} of 7 blocks"):
        eventually(lambda: None, lambda: f"{len(seen)} of 7 blocks", 0.0)


def test_ports_differ_and_nobody_listens_there() -> None:
    ports = free_ports(3)
    assert len(set(ports)) == 3
    assert all(20000 <= port < 32000 and not port_open(port) for port in ports)
    with socket.create_server(("127.0.0.1", ports[0])):
        assert port_open(ports[0])


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
