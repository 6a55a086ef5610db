"""A plain reset, without new weights, in the middle of somebody's update or after it: the epoch moves, and nobody new may use it."""

from __future__ import annotations

import pytest

from epochkv_fence import hub_events as ev
from epochkv_fence.authority import Origin, PoolRecord, Term
from epochkv_fence.messages import Bump, Mode, Propose, Source
from tests.unit.fence.helpers import HOLD, Driver, boot


def pool() -> Driver:
    hub = Driver()
    hub.lead(granting=True)
    hub.now += HOLD
    return hub


def modes(hub: Driver) -> dict[int, Mode]:
    return {grant.boot[0]: grant.mode for grant in hub.round()}


def updating(*boots: int) -> Driver:
    """Epoch 1 is a trainer's, with this list; both boots are old."""
    hub = pool()
    everyone(hub, 0, Mode.USE)
    hub.hear(Bump(1, 1, [boot(number) for number in boots], "v1"))
    everyone(hub, 0, Mode.USE)
    for number in (1, 2):
        hub.beat(number, 1, Mode.USE if number in boots else Mode.BYPASS)
    hub.round()
    assert hub.published == [1]
    return hub


def everyone(hub: Driver, epoch: int, mode: Mode) -> dict[int, Mode]:
    for number in (1, 2):
        hub.beat(number, epoch, mode)
    return modes(hub)


def plain(hub: Driver, how: str, epoch: int) -> None:
    if how == "client":
        hub.hear(Bump(77, epoch, moment=hub.moment()))
    else:
        hub.ask(epoch, version="" if how == "spec" else "v0")


LISTED = Origin(Source.TRAINER, "v1", listed=True)
NOBODY = {1: Mode.BYPASS, 2: Mode.BYPASS}


@pytest.mark.parametrize("how", ["client", "spec", "spec, weights as before"])
def test_a_plain_reset_in_an_open_update_moves_the_epoch_and_lets_nobody_in(how: str) -> None:
    hub = updating()
    hub.ask(1, version="v0")  # what its owner said long ago
    plain(hub, how, 2)
    assert everyone(hub, 1, Mode.BYPASS) == NOBODY
    assert everyone(hub, 2, Mode.BYPASS) == NOBODY
    assert hub.published == [1, 2]
    plain(hub, how, 3)  # and another one
    assert everyone(hub, 2, Mode.BYPASS) == NOBODY
    hub.hear(Bump(8, 4, [boot(2)], "v1"))  # the update's end
    assert everyone(hub, 3, Mode.BYPASS) == {1: Mode.BYPASS, 2: Mode.USE}


@pytest.mark.parametrize("how", ["client", "spec", "spec, weights as before"])
def test_a_plain_reset_after_an_update_lets_in_whom_the_update_listed(how: str) -> None:
    hub = updating(1)
    hub.ask(1, version="v0")
    for epoch in (2, 3):
        plain(hub, how, epoch)
        hub.beat(1, epoch - 1, Mode.USE)
        hub.beat(2, epoch - 1, Mode.BYPASS)
        assert modes(hub) == {1: Mode.USE, 2: Mode.BYPASS}, "however old the other one is"
        hub.beat(1, epoch, Mode.USE)
        hub.beat(2, epoch, Mode.BYPASS)
        hub.round()
    hub.hear(Bump(8, 4, [boot(2)], "v1"))
    assert everyone(hub, 3, Mode.BYPASS) == {1: Mode.BYPASS, 2: Mode.USE}


def test_one_that_was_not_heard_during_a_plain_reset_is_still_on_the_list() -> None:
    hub = updating(1, 2)
    plain(hub, "client", 2)
    hub.beat(2, 1, Mode.USE)
    assert modes(hub) == {2: Mode.USE}
    plain(hub, "client", 3)
    hub.beat(1, 1, Mode.USE)
    assert modes(hub) == {1: Mode.USE}


def test_a_pool_that_lives_on_plain_resets_goes_by_age_also_after_an_engines_proposal() -> None:
    hub = pool()
    everyone(hub, 0, Mode.USE)
    plain(hub, "client", 1)
    assert everyone(hub, 0, Mode.USE) == {1: Mode.USE, 2: Mode.USE}
    hub.hear(Propose(boot(1), 2, hub.moment()), peer=b"peer1")
    assert everyone(hub, 1, Mode.USE) == {1: Mode.USE, 2: Mode.USE}
    hub.beat(3, 1, Mode.BYPASS)
    assert modes(hub) == {3: Mode.BYPASS}
    plain(hub, "client", 3)
    hub.beat(3, 2, Mode.BYPASS)
    assert modes(hub) == {3: Mode.USE}


def test_an_epoch_that_an_engine_reports_after_a_restore_does_not_go_on_with_the_list() -> None:
    """Who uses the restored target may have missed the weights of the epochs that the record lost."""
    hub = Driver()
    hub.step(ev.Acquired(Term("h", 1), PoolRecord(1, 1, True, LISTED)))
    hub.now += HOLD
    hub.beat(1, 1, Mode.USE)
    hub.round()
    hub.beat(2, 5, Mode.USE)
    hub.beat(1, 1, Mode.USE)
    assert modes(hub) == {1: Mode.BYPASS, 2: Mode.USE}


@pytest.mark.parametrize("who", ["owner", "client"])
def test_a_reset_that_names_new_weights_is_an_update_of_its_own(who: str) -> None:
    hub = updating()
    hub.ask(1, version="v0")
    if who == "owner":
        hub.ask(2, version="v2")
    else:
        hub.hear(Bump(77, 2, None, "v2", moment=hub.moment()))
    assert everyone(hub, 1, Mode.BYPASS) == {1: Mode.USE, 2: Mode.USE}


def test_a_plain_reset_that_waited_for_the_updates_own_record_lets_nobody_in() -> None:
    hub = pool()
    everyone(hub, 0, Mode.USE)
    hub.hold_writes = True
    hub.hear(Bump(1, 1, [], "v1"))
    hub.hear(Bump(77, 2, moment=hub.moment()))
    hub.step(ev.Recorded(1))
    hub.step(ev.Recorded(2))
    assert everyone(hub, 0, Mode.USE) == NOBODY


def test_a_plain_reset_of_held_weights_waits_for_their_owner() -> None:
    hub = pool()
    hub.beat(1, 0, age=1000.0)
    hub.beat(2, 0, age=10.0)
    hub.ask(1, version="v2", ready=False)
    hub.now += 100.0
    hub.hear(Bump(77, 2, moment=hub.moment()))
    assert modes(hub) == NOBODY
    hub.ask(1, version="v2", ready=True)  # its number was passed meanwhile
    hub.beat(1, 2, Mode.BYPASS, age=1100.0)
    hub.beat(2, 2, Mode.BYPASS, age=110.0)
    assert modes(hub) == {1: Mode.USE, 2: Mode.BYPASS}  # by their age when the weights were asked for


def test_an_owner_who_raises_once_more_when_the_weights_are_ready_goes_by_age() -> None:
    hub = pool()
    everyone(hub, 0, Mode.USE)
    hub.ask(1, version="v2", ready=False)
    hub.hear(Bump(77, 2, moment=hub.moment()))
    hub.ask(3, version="v2", ready=True)
    assert everyone(hub, 2, Mode.BYPASS) == {1: Mode.USE, 2: Mode.USE}


def test_a_plain_reset_right_after_a_change_of_hub_keeps_those_who_had_the_weights() -> None:
    """The list went with the old hub; who uses the epoch says so when it is heard."""
    hub = Driver()
    hub.step(ev.Acquired(Term("h", 1), PoolRecord(1, 1, True, LISTED)))
    hub.hear(Bump(77, 2, moment=hub.moment()))
    hub.beat(1, 1, Mode.USE)
    hub.beat(2, 1, Mode.BYPASS)
    assert modes(hub) == {1: Mode.USE, 2: Mode.BYPASS}
    assert hub.writes[-1] == ev.Record(2, Origin(Source.TRAINER, "", listed=None))


@pytest.mark.parametrize("how", ["client", "spec"])
def test_a_hub_that_finds_a_plain_reset_of_listed_weights_goes_by_no_age_either(how: str) -> None:
    hub = Driver()
    hub.step(ev.Acquired(Term("h", 2), PoolRecord(2, 2, True, Origin(Source.SPEC, "", listed=True))))
    hub.now += HOLD
    hub.beat(1, 2, Mode.USE)
    hub.beat(2, 2, Mode.BYPASS)
    assert modes(hub) == {1: Mode.USE, 2: Mode.BYPASS}
    plain(hub, how, 3)
    hub.beat(1, 2, Mode.USE)
    hub.beat(2, 2, Mode.BYPASS)
    assert modes(hub) == {1: Mode.USE, 2: Mode.BYPASS}


@pytest.mark.parametrize("who", ["client", "spec"])
def test_a_reset_that_names_the_same_weights_again_brings_none_also_after_a_plain_one(who: str) -> None:
    hub = updating(1)
    plain(hub, "client", 2)
    hub.beat(1, 1, Mode.USE)
    hub.round()
    assert hub.hub.snapshot(hub.now).weights_version == "v1"
    if who == "client":
        hub.hear(Bump(77, 3, None, "v1", moment=hub.moment()))
    else:
        hub.ask(3, version="v1")
    hub.beat(1, 2, Mode.USE)
    hub.beat(2, 2, Mode.BYPASS)
    assert modes(hub) == {1: Mode.USE, 2: Mode.BYPASS}


def test_that_an_update_failed_is_said_as_long_as_it_decides_who_shares() -> None:
    hub = updating(1)
    hub.hear(Bump(8, 2, [], "failed: v2 0a0b0c0d"))
    plain(hub, "client", 3)
    assert everyone(hub, 2, Mode.BYPASS) == NOBODY
    assert hub.hub.snapshot(hub.now).weights_version == "failed: v2 0a0b0c0d"
    hub.hear(Bump(9, 4, None, "v3", moment=hub.moment()))
    assert everyone(hub, 3, Mode.BYPASS) == {1: Mode.USE, 2: Mode.USE}
    assert hub.hub.snapshot(hub.now).weights_version == "v3"


@pytest.mark.parametrize("boots", [(1,), ()])
def test_an_owner_who_says_that_weights_are_to_come_brings_them_also_under_a_name_of_before(boots: tuple[int, ...]) -> None:
    """He goes back to older weights, after a trainer's update that ended well or failed."""
    hub = updating(*boots)
    hub.ask(1, version="v0")
    hub.ask(2, version="v0", ready=False)
    assert everyone(hub, 1, Mode.BYPASS) == NOBODY
    assert everyone(hub, 2, Mode.BYPASS) == NOBODY
    plain(hub, "client", 3)
    assert everyone(hub, 2, Mode.BYPASS) == NOBODY
    hub.ask(2, version="v0", ready=True)
    assert everyone(hub, 3, Mode.BYPASS) == {1: Mode.USE, 2: Mode.USE}


def test_weights_that_never_change_are_nobodys_update() -> None:
    hub = Driver(weights_source="Model")
    hub.lead(granting=True)
    hub.hear(Bump(1, 1, []))
    hub.hear(Bump(77, 2, moment=hub.moment()))
    assert everyone(hub, 0, Mode.USE) == {1: Mode.USE, 2: Mode.USE}
