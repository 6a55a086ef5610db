"""What an engine's log says when it changes its standing with the pool: one line for each change, with the remedy."""

import pytest

from tests.scheduler.rigs import MakeRig
from tests.support.scheduler import BLOCK, SharedStore, prompt

TOKENS = prompt(1, 4 * BLOCK)


class Lines:
    """The fence's lines since the last look."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog
        caplog.set_level("INFO", logger="vllm.epochkv.fence")

    def new(self) -> list[str]:
        found = [f"{r.levelname} {r.getMessage()}" for r in self._caplog.records if r.name == "vllm.epochkv.fence"]
        self._caplog.clear()
        return found

    def one(self, *words: str) -> None:
        """Exactly one line came, and it has these words."""
        lines = self.new()
        assert len(lines) == 1, lines
        for word in words:
            assert word in lines[0]


def test_a_life_in_one_line_for_each_change(make_rig: MakeRig, caplog: pytest.LogCaptureFixture) -> None:
    rig, lines = make_rig(store=SharedStore()), Lines(caplog)
    rig.serve(TOKENS)
    assert lines.new() == [], "nothing was granted yet; the agent tells of the hub"
    rig.adopt(3)
    lines.one("INFO", "epoch 3 in use")
    for _ in range(3):
        rig.adopt(3)
        rig.serve(TOKENS)
    assert lines.new() == []
    rig.adopt(4)
    lines.one("INFO", "epoch 4 in use")
    rig.lease_until = 0.0
    rig.connector.scheduler.gauges()  # as a heartbeat does, without any request
    lines.one("WARNING", "lease on epoch 4 is over")
    rig.serve(TOKENS)
    assert lines.new() == []
    rig.lease_until = float("inf")
    rig.serve(TOKENS)
    lines.one("INFO", "epoch 4 in use, back from bypass")
    rig.adopt(5)
    lines.one("INFO", "epoch 5 in use")


def test_an_adoption_whose_lease_is_yet_to_begin_is_no_loss(make_rig: MakeRig, caplog: pytest.LogCaptureFixture) -> None:
    """The agent binds the root first and moves the lease then: at the first grant, and at the first one after a hub was away."""
    rig, lines = make_rig(), Lines(caplog)
    rig.lease_until = 0.0
    rig.adopt(3)
    rig.connector.scheduler.gauges()
    assert lines.new() == []
    rig.lease_until = float("inf")
    rig.connector.scheduler.gauges()
    lines.one("INFO", "epoch 3 in use")
    rig.lease_until = 0.0
    rig.connector.scheduler.gauges()
    lines.one("WARNING", "lease on epoch 3 is over")
    rig.adopt(4)
    rig.connector.scheduler.gauges()
    assert lines.new() == []
    rig.lease_until = float("inf")
    rig.connector.scheduler.gauges()
    lines.one("INFO", "epoch 4 in use, back from bypass")


def test_an_engine_that_ends_does_not_warn_of_the_lease_that_it_gives_back(make_rig: MakeRig, caplog: pytest.LogCaptureFixture) -> None:
    rig, lines = make_rig(), Lines(caplog)
    rig.adopt(3)
    rig.serve(TOKENS)
    lines.new()
    rig.connector.scheduler.stop()
    rig.lease_until = 0.0
    rig.connector.scheduler.gauges()
    assert lines.new() == []
