"""`RemoveAll`, rule by rule: loads are held and drained everywhere, the store is wiped until it is empty, then the epoch is
published and loads are released. L = 30 s, margin 3 s.
"""

from __future__ import annotations

import pytest

from epochkv_fence import hub_events as ev
from epochkv_fence.authority import PoolRecord, Term
from epochkv_fence.messages import Mode, Reclaim
from epochkv_fence.wipe import WIPE_LANDS_SECONDS, WIPE_SECONDS, Wiper
from tests.unit.fence.helpers import HOLD, LEASE, Driver, boot, config

MODEL = {"reclaim": "RemoveAll", "weights_source": "Model"}


def led(epoch: int = 0, **keys: object) -> Driver:
    """A hub long past its own leadership wait, with boots 1 and 2 in use of `epoch`, and a load open on each."""
    hub = Driver(**{**MODEL, **keys})
    hub.lead(target=epoch, published=epoch, granting=True)
    hub.now += HOLD
    for number in (1, 2):
        hub.beat(number)
    hub.round()
    for number in (1, 2):
        hub.beat(number, epoch=epoch, loading=1)
    hub.round()
    return hub


def acknowledge(hub: Driver, number: int, epoch: int, loading: int | None = 0) -> None:
    hub.beat(number, epoch=epoch, mode=Mode.BYPASS, loading=loading)


def wiping() -> Driver:
    """Everyone has drained for epoch 1 and the wipe is asked for."""
    hub = led()
    hub.ask(1)
    for number in (1, 2):
        acknowledge(hub, number, 1)
    hub.round()
    assert [wipe.epoch for wipe in hub.stores] == [1]
    return hub


def test_drained_wiped_until_empty_published_and_released_in_this_order() -> None:
    hub = led()
    hub.ask(1)
    assert {grant.mode for grant in hub.round()} <= {Mode.BYPASS}
    acknowledge(hub, 1, 1)
    acknowledge(hub, 2, 1, loading=1)
    assert {grant.mode for grant in hub.round()} == {Mode.BYPASS}
    assert hub.stores == []  # boot 2 still reads
    acknowledge(hub, 2, 1)
    hub.round()
    assert [wipe.epoch for wipe in hub.stores] == [1]
    assert hub.published == []
    hub.step(ev.Wiped(1, 7, 700))  # something was there: again
    hub.round()
    assert [wipe.epoch for wipe in hub.stores] == [1, 1]
    assert hub.published == []
    hub.step(ev.Wiped(1, 0, 0))
    hub.round()
    assert hub.published == [1]
    hub.beat(1, epoch=1, mode=Mode.BYPASS, loading=0)
    assert {grant.mode for grant in hub.round()} == {Mode.USE}
    snapshot = hub.hub.snapshot(hub.now)
    assert (snapshot.reclaimed, snapshot.reclaimed_keys, snapshot.reclaimed_bytes, snapshot.wipe_failed) == (1, 7, 700, False)


@pytest.mark.parametrize(("epoch", "mode", "loading"), [(1, Mode.BYPASS, None), (1, Mode.BYPASS, 2), (1, Mode.USE, 0), (0, Mode.BYPASS, 0)])
def test_what_does_not_count_as_drained(epoch: int, mode: Mode, loading: int | None) -> None:
    hub = led()
    hub.ask(1)
    acknowledge(hub, 1, 1)
    hub.beat(2, epoch=epoch, mode=mode, loading=loading)
    hub.round()
    assert hub.stores == []


def test_only_the_newest_heartbeat_counts() -> None:
    hub = led()
    hub.ask(1)
    acknowledge(hub, 1, 1)
    acknowledge(hub, 2, 1, loading=3)
    hub.beat(2, epoch=1, mode=Mode.BYPASS, loading=0, seq=1)  # an older one, late
    hub.round()
    assert hub.stores == []


def test_a_dead_engine_holds_the_wipe_up_until_its_grants_are_dead() -> None:
    hub = led()
    granted = hub.now
    hub.ask(1)
    acknowledge(hub, 1, 1)
    hub.now = granted + HOLD - 0.01
    acknowledge(hub, 1, 1)
    hub.round()
    assert hub.stores == []
    assert hub.hub.round_at(hub.now) == pytest.approx(granted + HOLD)
    hub.now = granted + HOLD
    hub.round()
    assert [wipe.epoch for wipe in hub.stores] == [1]


def test_an_engine_that_joins_meanwhile_is_in_bypass_and_holds_nothing_up() -> None:
    hub = led()
    hub.ask(1)
    hub.beat(3)
    assert {(grant.boot, grant.mode) for grant in hub.round()} >= {(boot(3), Mode.BYPASS)}
    hub.beat(3)  # it never acknowledges, and was never granted anything that it could read with
    for number in (1, 2):
        acknowledge(hub, number, 1)
    hub.round()
    assert [wipe.epoch for wipe in hub.stores] == [1]
    hub.beat(4)
    assert {(grant.boot, grant.mode) for grant in hub.round()} == {(boot(4), Mode.BYPASS)}


def test_a_new_leader_waits_for_grants_of_others_before_it_wipes() -> None:
    hub = Driver(**MODEL)
    hub.lead(target=1, published=0, granting=True)
    began = hub.now
    acknowledge(hub, 1, 1)
    hub.now = began + HOLD - 0.01
    acknowledge(hub, 1, 1)
    assert {grant.mode for grant in hub.round()} == {Mode.BYPASS}
    assert hub.stores == []
    hub.now = began + HOLD
    hub.round()
    assert [wipe.epoch for wipe in hub.stores] == [1]


def test_a_pool_that_nobody_was_ever_granted_for_holds_no_keys() -> None:
    hub = Driver(**MODEL)
    hub.lead(target=1, published=0, granting=False)
    hub.round()
    assert hub.stores == []
    assert hub.published == [1]


@pytest.mark.parametrize("failure", ["keys", "silence", "failed"])
def test_the_wipe_is_given_up_and_the_epoch_published(failure: str) -> None:
    hub = wiping()
    allowed = hub.now
    answers = {"keys": ev.Wiped(1, 5), "failed": ev.WipeFailed(1)}
    while hub.published == [] and hub.now < allowed + 60:
        if failure in answers:
            hub.step(answers[failure])
        due = min(hub.hub.tick_at(), hub.hub.round_at(hub.now))
        hub.now = max(hub.now + 0.05, min(due, hub.now + 1.0))
        hub.step(ev.Tick())
        hub.round()
    assert allowed + WIPE_SECONDS <= hub.now <= allowed + WIPE_SECONDS + 2.0
    assert hub.published == [1]
    assert hub.hub.snapshot(hub.now).wipe_failed
    hub.beat(1, epoch=1, mode=Mode.BYPASS, loading=0)
    hub.round()
    hub.step(ev.Tick())
    assert hub.of(Reclaim)[-1].below == 1  # the keys are removed one by one


def test_no_wipe_may_land_after_it_was_given_up() -> None:
    hub = led()
    hub.ask(1)
    for number in (1, 2):
        acknowledge(hub, number, 1, loading=None)
    hub.round()
    allowed = hub.now
    hub.now += WIPE_SECONDS - 1.0
    for number in (1, 2):
        acknowledge(hub, number, 1)
    hub.round()  # drained late: one wipe, which fails at once, and may still land
    hub.step(ev.WipeFailed(1))
    (sent,) = hub.stores
    assert isinstance(sent, ev.Wipe)
    assert sent.before == pytest.approx(allowed + WIPE_SECONDS)
    hub.step(ev.Tick())
    hub.round()
    assert hub.published == []
    hub.now = allowed + WIPE_SECONDS
    hub.step(ev.Tick())
    hub.round()
    assert hub.published == [1]


def test_a_wipe_has_to_begin_before_another_hub_could_let_anyone_read() -> None:
    hub = led()
    hub.ask(1)
    for number in (1, 2):
        acknowledge(hub, number, 1)
    number = hub.begin()
    began = hub.now
    hub.now += 1.0
    hub.step(ev.RoundVerified(number))
    (sent,) = hub.stores
    assert isinstance(sent, ev.Wipe)
    assert sent.before == pytest.approx(began + WIPE_LANDS_SECONDS)


def test_after_a_read_that_took_too_long_nothing_is_wiped() -> None:
    hub = led()
    hub.ask(1)
    for number in (1, 2):
        acknowledge(hub, number, 1)
    number = hub.begin()
    hub.now += WIPE_LANDS_SECONDS
    hub.step(ev.RoundVerified(number))
    assert hub.stores == []
    hub.round()
    assert [wipe.epoch for wipe in hub.stores] == [1]


def test_without_the_read_nothing_is_wiped() -> None:
    hub = led()
    hub.ask(1)
    for number in (1, 2):
        acknowledge(hub, number, 1)
    hub.step(ev.RoundDropped(hub.begin()))
    assert hub.stores == []
    number = hub.begin()
    hub.step(ev.SteppedDown())
    hub.step(ev.RoundVerified(number))
    assert hub.stores == []


def test_a_change_of_term_forgets_what_was_wiped() -> None:
    hub = wiping()
    hub.step(ev.SteppedDown())
    hub.lead(target=1, published=0, granting=True, term=Term("hub-a", 2))
    hub.step(ev.Wiped(1, 0, 0))  # of the term before
    hub.now += HOLD
    for number in (1, 2):
        acknowledge(hub, number, 1)
    hub.round()
    assert hub.published == []
    assert [wipe.epoch for wipe in hub.stores] == [1, 1]
    hub.step(ev.Wiped(1, 0, 0))
    hub.round()
    assert hub.published == [1]


def test_a_newer_epoch_is_wiped_for_anew() -> None:
    hub = wiping()
    hub.ask(2)
    hub.step(ev.Wiped(1, 0, 0))
    for number in (1, 2):
        acknowledge(hub, number, 1)
    hub.round()
    assert hub.published == []
    for number in (1, 2):
        acknowledge(hub, number, 2)
    hub.round()
    assert [wipe.epoch for wipe in hub.stores] == [1, 2]
    hub.step(ev.Wiped(2, 0, 0))
    hub.round()
    assert hub.published == [2]


def test_a_policy_that_is_changed_in_mid_reset_holds_from_the_next_reset_on() -> None:
    hub = led(reclaim="Delete")
    hub.ask(1)
    hub.step(ev.Configured(config(**MODEL)))
    hub.beat(1, epoch=1)  # granted Use of 1 under Delete
    assert {grant.mode for grant in hub.round()} == {Mode.USE}
    hub.beat(2, epoch=1)
    hub.round()
    assert (hub.stores, hub.published) == ([], [1])
    hub.ask(2)
    hub.beat(1, epoch=1)
    assert {grant.mode for grant in hub.round()} == {Mode.BYPASS}
    hub.step(ev.Configured(config(weights_source="Model")))
    for number in (1, 2):
        acknowledge(hub, number, 2)
    assert {grant.mode for grant in hub.round()} == {Mode.BYPASS}
    assert [wipe.epoch for wipe in hub.stores] == [2]


def test_use_that_another_hub_granted_under_another_policy_is_taken_back() -> None:
    hub = Driver(**MODEL)
    hub.lead(target=1, published=0, granting=True)
    hub.now += HOLD - 1.0
    hub.beat(1, epoch=1, mode=Mode.USE, loading=0)
    assert {grant.mode for grant in hub.round()} == {Mode.BYPASS}
    hub.now += 1.0
    hub.beat(1, epoch=1, mode=Mode.USE, loading=0)  # sent before it heard of it
    hub.round()
    assert hub.stores == []
    acknowledge(hub, 1, 1)
    hub.round()
    assert [wipe.epoch for wipe in hub.stores] == [1]


def test_the_weights_decide_again_after_publication() -> None:
    hub = led(weights_source="Pushed", join_after_seconds=60.0)
    hub.beat(3, age=1.0)
    hub.round()
    hub.ask(1)
    for number in (1, 2):
        acknowledge(hub, number, 1)
    hub.beat(3, epoch=1, mode=Mode.BYPASS, age=1.0, loading=0)
    hub.round()
    hub.step(ev.Wiped(1, 0))
    hub.round()
    sent = len(hub.sent)
    assert hub.published == [1]
    hub.beat(1, epoch=1, mode=Mode.BYPASS, loading=0)
    hub.beat(3, epoch=1, mode=Mode.BYPASS, age=1.0, loading=0)
    assert {grant.boot: grant.mode for grant in hub.round()} == {boot(1): Mode.USE, boot(3): Mode.BYPASS}
    assert len(hub.sent) == sent + 2
    assert [view.boot for view in hub.hub.snapshot(hub.now).weights_pending] == [boot(3)]


def test_released_engines_are_told_at_once() -> None:
    hub = wiping()
    hub.step(ev.Wiped(1, 0))
    before = len(hub.nudged())
    hub.round()
    assert hub.nudged()[before:] == [boot(1), boot(2)]
    acknowledge(hub, 1, 1)
    assert hub.hub.round_at(hub.now) == hub.now


def test_what_was_being_written_during_the_wipe_is_looked_for_once() -> None:
    hub = wiping()
    hub.step(ev.Wiped(1, 0))
    hub.round()
    hub.step(ev.Tick())
    assert hub.of(Reclaim) == []
    hub.now += 10.0
    acknowledge(hub, 1, 1)
    hub.step(ev.Tick())
    assert [request.below for request in hub.of(Reclaim)] == [1]


def test_a_published_epoch_that_is_found_recorded_needs_no_wipe() -> None:
    hub = led()
    hub.ask(1)
    hub.step(ev.Observed(PoolRecord(target=1, published=1)))
    hub.beat(1, epoch=1, mode=Mode.BYPASS, loading=0)
    assert {grant.mode for grant in hub.round()} == {Mode.USE}
    assert hub.stores == []


def test_while_a_wipe_may_land_nobody_is_let_in_whoever_published() -> None:
    hub = wiping()
    sent = hub.stores[-1]
    assert isinstance(sent, ev.Wipe)
    hub.step(ev.Observed(PoolRecord(target=1, published=1)))
    acknowledge(hub, 1, 1)
    assert {grant.mode for grant in hub.round()} == {Mode.BYPASS}
    hub.now = sent.before
    acknowledge(hub, 1, 1)
    assert {grant.mode for grant in hub.round()} == {Mode.USE}


def test_waiting_for_an_answer_of_the_store_asks_for_nothing() -> None:
    hub = wiping()
    hub.step(ev.Tick())
    assert hub.hub.round_at(hub.now) == float("inf")
    assert hub.hub.tick_at() > hub.now


def test_a_wipe_without_an_answer_may_land_after_one_that_was_answered() -> None:
    wiper = Wiper()
    wiper.begin(needed=True)
    wiper.start(1, before=10.0)
    wiper.failed(1, now=1.0)
    wiper.start(1, before=12.0)
    wiper.answered(1, keys=0, target=1)
    assert wiper.done
    assert wiper.landed_at() == 10.0


@pytest.mark.parametrize("policy", ["Delete", "Retain", "RemoveAll"])
def test_a_new_hub_holds_loads_while_a_wipe_of_the_old_one_may_begin(policy: str) -> None:
    old = wiping()
    sent = old.stores[-1]
    assert isinstance(sent, ev.Wipe)
    hub = Driver(weights_source="Model", reclaim=policy, store_admin=True)
    hub.lead(target=1, published=0, granting=True, term=Term("hub-b", 2))
    began = hub.now
    until = began + WIPE_LANDS_SECONDS * HOLD / LEASE  # by a clock that is as fast as the margin allows
    hub.beat(1, epoch=1, mode=Mode.USE, loading=0)
    assert {grant.mode for grant in hub.round()} == {Mode.BYPASS}
    hub.now = until - 0.01
    acknowledge(hub, 1, 1)
    assert {grant.mode for grant in hub.round()} == {Mode.BYPASS}
    assert hub.hub.tick_at() <= until
    hub.now = until
    before = len(hub.nudged())
    hub.step(ev.Tick())
    acknowledge(hub, 1, 1)
    released = policy != "RemoveAll"  # that one wipes itself
    assert hub.nudged()[before:] == [boot(1)] * released
    assert {grant.mode for grant in hub.round()} == {Mode.USE if released else Mode.BYPASS}
    hub.now = began + HOLD
    acknowledge(hub, 1, 1)
    hub.round()
    assert hub.published == [1] * released  # no later than without


def test_a_new_hub_of_a_published_epoch_or_of_a_pool_without_grants_holds_nothing() -> None:
    for published, granting in ((1, True), (0, False)):
        hub = Driver(weights_source="Model")
        hub.lead(target=1, published=published, granting=granting)
        hub.beat(1, epoch=1, mode=Mode.USE, loading=0)
        assert {grant.mode for grant in hub.round()} == {Mode.USE}


def test_a_hub_that_learns_of_the_publication_holds_nothing_any_more() -> None:
    """Whoever published has waited until no wipe could begin."""
    hub = Driver(weights_source="Model")
    hub.lead(target=1, published=0, granting=True)
    hub.step(ev.Observed(PoolRecord(target=1, published=1)))
    hub.beat(1, epoch=1, mode=Mode.BYPASS, loading=0)
    assert {grant.mode for grant in hub.round()} == {Mode.USE}


@pytest.mark.parametrize("lease", [1.0, 4.0, 30.0, 600.0])
def test_holding_loads_for_a_wipe_never_outlasts_the_wait_for_older_grants(lease: float) -> None:
    hub = Driver(lease_seconds=lease)
    assert hub.hub._others_wipe_lands() <= hub.hub._lead_wait()
    assert hub.hub._others_wipe_lands() >= min(WIPE_LANDS_SECONDS, lease)
