"""A fleet of engines: nobody falls over, and nothing is written that need not be. `make bench-operator` has larger ones, and figures."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from bench.operator.fleet import Fleet
from hack.cluster.controlplane import ControlPlane
from hack.waiting import eventually
from tests.cluster.operator_harness import Namespace, OperatorProcess, install_crds

ENGINES = 300
RESYNC_SECONDS = 6.0
WAIT_SECONDS = 200.0


@pytest.mark.slow  # `test_operator_reconcile.py` has a few objects idle, and taken over, without a write
@pytest.mark.timeout(600)
def test_a_fleet_idles_and_is_taken_over_without_a_write(
    fresh_control_plane: ControlPlane, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install_crds(fresh_control_plane)
    space = Namespace.create_in(fresh_control_plane, "fleet")
    began = time.monotonic()
    with OperatorProcess(fresh_control_plane, space.name, tmp_path, resync_seconds=RESYNC_SECONDS) as operator:
        operator.wait_ready()
        fleet = Fleet(space, operator, pods=1)
        fleet.grow(ENGINES)
        fleet.settle()
        assert fleet.writes() >= 6 * ENGINES, "that much makes them"

        writes, looks, since = fleet.writes(), fleet.looked(), time.time()
        eventually(lambda: fleet.listed() > since, "a resync of each kind", WAIT_SECONDS)
        eventually(lambda: fleet.looked() >= looks + ENGINES, "a look at each engine", WAIT_SECONDS)
        assert fleet.writes() == writes
        lags = {loop: fleet.longest_lag(loop) for loop in ("hub", "main")}

        fleet.restart()
        fleet.settle()
        assert fleet.writes() == 0, "a new process has nothing to do"
        assert fleet.exits() == 0
        assert operator.metric("epochkv_operator_missed_objects_total") == 0
    with capsys.disabled():
        late = ", ".join(f"{loop} {lag:g} s" for loop, lag in lags.items())
        print(f" [{ENGINES} engines in {time.monotonic() - began:.0f} s; no turn of a loop was later than by: {late}]", end="")
