"""The calendar of blocks: who cannot have a new block is not looked at. `test_running_ahead.py` shows that nobody is missed."""

from epochkv_connector.scheduler.steps import Boundaries

SIZE = 16


def test_decoding_requests_are_looked_at_once_a_block() -> None:
    boundaries = Boundaries(1)
    names = [f"r{index}" for index in range(100)]
    known = {name: index for index, name in enumerate(names)}
    for name in names:
        boundaries.start(name)
    assert boundaries.due(names) == names
    for name in names:
        boundaries.later(name, SIZE - known[name] % SIZE)
    for step in range(1, 1 + 4 * SIZE):
        due = boundaries.due(names)
        assert due == sorted((name for name in names if (known[name] + step) % SIZE == 0), key=due.index)
        assert len(due) in (6, 7)
        for name in due:
            boundaries.later(name, SIZE)
