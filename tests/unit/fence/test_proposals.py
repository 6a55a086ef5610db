"""A local reset that asks the pool for an epoch brings weights to nobody: what a trainer keeps closed it does not open."""

from __future__ import annotations

from epochkv_fence import hub_events as ev
from epochkv_fence.authority import Origin, PoolRecord
from epochkv_fence.messages import Bump, Mode, Propose, Source
from tests.unit.fence.helpers import TERM, Driver, boot

OLD = 1000.0  # seconds: older than any `join_after_seconds` here


def pool() -> Driver:
    hub = Driver()
    hub.lead(granting=True)
    return hub


def modes(hub: Driver) -> dict[int, tuple[int, Mode]]:
    return {grant.boot[0]: (grant.epoch, grant.mode) for grant in hub.round()}


def everyone(hub: Driver, epoch: int, **mode: Mode) -> dict[int, tuple[int, Mode]]:
    """Both boots acknowledge `epoch` in the modes given, and are answered."""
    for number, name in ((1, "one"), (2, "two")):
        hub.beat(number, epoch, mode.get(name, Mode.USE), age=OLD)
    return modes(hub)


def listed(hub: Driver, *numbers: int) -> None:
    """A trainer's update: epoch 1 belongs to these boots."""
    everyone(hub, 0)
    hub.hear(Bump(1, 1, [boot(number) for number in numbers], "v1", moment=hub.moment()))


def test_where_nobody_keeps_lists_age_decides() -> None:
    hub = pool()
    everyone(hub, 0)
    hub.hear(Propose(boot(1), 1, hub.moment()), peer=b"peer1")
    assert everyone(hub, 0) == {1: (1, Mode.USE), 2: (1, Mode.USE)}


def test_it_opens_nothing_while_the_first_half_of_fence_first_waits_for_weights() -> None:
    hub = pool()
    listed(hub)
    everyone(hub, 0)
    everyone(hub, 1, one=Mode.BYPASS, two=Mode.BYPASS)
    hub.hear(Propose(boot(1), 2, hub.moment()), peer=b"peer1")
    assert everyone(hub, 1, one=Mode.BYPASS, two=Mode.BYPASS) == {1: (1, Mode.BYPASS), 2: (1, Mode.BYPASS)}
    hub.hear(Bump(1, 1, [boot(1), boot(2)], "v1"))  # the weights are there
    everyone(hub, 1, one=Mode.BYPASS, two=Mode.BYPASS)
    everyone(hub, 1)
    hub.hear(Propose(boot(1), 2, hub.moment()), peer=b"peer1")  # an agent repeats it: of a reset before the weights were there
    assert everyone(hub, 1) == {1: (1, Mode.USE), 2: (1, Mode.USE)}
    hub.now += 1.0
    hub.hear(Propose(boot(1), 2, hub.moment()), peer=b"peer1")  # of a reset since
    assert everyone(hub, 1) == {1: (2, Mode.USE), 2: (2, Mode.USE)}


def test_a_pool_all_in_bypass_that_lives_on_proposals_alone_goes_by_age() -> None:
    hub = Driver()
    hub.step(ev.Acquired(TERM, PoolRecord(5, 5, True, Origin(Source.ENGINE))))
    assert everyone(hub, 5, one=Mode.BYPASS, two=Mode.BYPASS) == {1: (5, Mode.BYPASS), 2: (5, Mode.BYPASS)}
    hub.hear(Propose(boot(1), 6, hub.moment()), peer=b"peer1")
    hub.hear(Propose(boot(2), 6, hub.moment()), peer=b"peer2")
    assert everyone(hub, 5, one=Mode.BYPASS, two=Mode.BYPASS) == {1: (6, Mode.USE), 2: (6, Mode.USE)}


def test_what_is_kept_of_refused_proposals_goes_with_their_boots() -> None:
    hub = pool()
    listed(hub)
    everyone(hub, 0)
    hub.hear(Propose(boot(1), 2, hub.moment()), peer=b"peer1")
    hub.hear(Propose(boot(9), 2, hub.moment()), peer=b"peer9")  # never heard of
    assert list(hub.hub._gate.refused) == [boot(1)]
    hub.now += 1000.0
    hub.step(ev.Tick())
    assert hub.hub._gate.refused == {}


def test_it_opens_nothing_while_the_owner_holds_the_weights() -> None:
    hub = pool()
    everyone(hub, 0)
    hub.ask(1, version="v1", ready=False)
    everyone(hub, 0)
    hub.hear(Propose(boot(1), 2, hub.moment()), peer=b"peer1")
    assert everyone(hub, 1, one=Mode.BYPASS, two=Mode.BYPASS) == {1: (1, Mode.BYPASS), 2: (1, Mode.BYPASS)}


def test_exactly_those_that_may_use_the_epoch_may_use_the_proposed_one() -> None:
    hub = pool()
    listed(hub, 1)  # the other one missed the push
    everyone(hub, 0)
    everyone(hub, 1, two=Mode.BYPASS)
    hub.hear(Propose(boot(1), 2, hub.moment()), peer=b"peer1")
    assert everyone(hub, 1, two=Mode.BYPASS) == {1: (2, Mode.USE), 2: (2, Mode.BYPASS)}
    everyone(hub, 2, two=Mode.BYPASS)
    hub.hear(Propose(boot(1), 3, hub.moment()), peer=b"peer1")
    assert everyone(hub, 2, two=Mode.BYPASS) == {1: (3, Mode.USE), 2: (3, Mode.BYPASS)}


def test_a_new_hub_that_lost_the_list_opens_nothing_either() -> None:
    for origin in (Origin(Source.TRAINER, "v1"), Origin(Source.TRAINER), Origin(Source.ENGINE, "v1"), Origin(Source.SPEC, "v1")):
        hub = Driver()
        hub.step(ev.Acquired(TERM, PoolRecord(5, 5, True, origin)))
        everyone(hub, 5, two=Mode.BYPASS)
        hub.hear(Propose(boot(1), 6, hub.moment()), peer=b"peer1")
        assert everyone(hub, 5, two=Mode.BYPASS) == {1: (6, Mode.USE), 2: (6, Mode.BYPASS)}


def test_a_trainers_list_for_the_same_epoch_counts_alone() -> None:
    hub = pool()
    listed(hub, 1, 2)
    everyone(hub, 0)
    everyone(hub, 1)
    hub.hold_writes = True
    hub.hear(Propose(boot(1), 2, hub.moment()), peer=b"peer1")
    hub.hear(Bump(2, 2, [], "v1"))  # before the proposal is recorded
    hub.step(ev.Recorded(2))
    assert everyone(hub, 1) == {1: (2, Mode.BYPASS), 2: (2, Mode.BYPASS)}


def test_a_change_of_hub_loses_no_hold() -> None:
    hub = Driver()
    hub.ask(5, fresh=False, version="v1", ready=False)
    hub.step(ev.Acquired(TERM, PoolRecord(5, 5, True, Origin(Source.SPEC, "v1"))))
    both = {1: (5, Mode.BYPASS), 2: (5, Mode.BYPASS)}
    assert everyone(hub, 5, one=Mode.BYPASS, two=Mode.BYPASS) == both
    hub.hear(Propose(boot(1), 6, hub.moment()), peer=b"peer1")
    assert everyone(hub, 5, one=Mode.BYPASS, two=Mode.BYPASS) == both
