"""What a standalone hub's log and metrics say of a pool, and the address that it advertises: values in, text out."""

import logging
import socket
from dataclasses import replace

import pytest

from epochkv_fence.connection import ConfigurationError
from epochkv_fence.hub.record import Record
from epochkv_fence.metrics import exposition
from epochkv_fence.protocol.messages import Source
from epochkv_fence.protocol.pool import EngineView, PoolRecord, PoolSnapshot
from epochkv_fence.standalone.hub import advertised, split_listen
from epochkv_fence.standalone.report import compare

W, V = b"w" * 16, b"v" * 16


def engine(
    number: int, epoch: int | None = 0, alive: bool = True, converged: bool = True, weights: bytes | None = W, **extra: object
) -> EngineView:
    known = {"engine": "rollout", "pod": f"rollout-{number}", "fingerprint": "fp", "weights": weights, **extra}
    return EngineView(number.to_bytes(16, "big"), epoch, converged, alive, **known)  # type: ignore[arg-type]


def pool(*engines: EngineView, leading: bool = True, target: int = 0, published: int = 0, **extra: object) -> PoolSnapshot:
    return PoolSnapshot(target, published, engines, leading=leading, asked=target, **extra)  # type: ignore[arg-type]


def texts(before: PoolSnapshot | None, now: PoolSnapshot) -> list[str]:
    return [line.text for line in compare(before, now)]


def test_what_the_record_held_when_a_hub_begins_to_lead_is_no_new_reset() -> None:
    before = pool(leading=False)
    for now in (pool(target=4, published=4), pool(target=4, published=3, origin=Source.TRAINER)):
        assert texts(before, now) == [f"leading: epoch 4, published {now.published}"]
    assert texts(pool(target=4, published=3), pool(target=4, published=4)) == ["epoch 4 published: no engine uses an older one"]


def test_the_next_epoch_asked_for_at_once_makes_nobody_late() -> None:
    before = pool(engine(1, 1, converged=False), engine(2, None, converged=False), target=2, published=1)
    now = pool(engine(1, 2, converged=False), engine(2, None, converged=False), target=3, published=2)  # the second one has just joined
    assert texts(before, now) == ["epoch 3 recorded, asked for; 2 of 2 engines to go", "epoch 2 published: no engine uses an older one"]


def test_who_comes_goes_does_not_know_its_weights_or_was_fenced_is_told() -> None:
    late = engine(1, 0, converged=False)
    assert texts(pool(), pool(late)) == ["engine rollout-1 joined", f"engine rollout-1 holds weights {W.hex()[:8]}"]
    assert texts(pool(late), pool(engine(1, weights=None, weights_note="asleep"))) == ["engine rollout-1 holds unknown weights: asleep"]
    (line,) = compare(pool(late, target=1), pool(late, target=1, published=1))
    assert (line.level, line.text.partition("; ")[2]) == (logging.WARNING, "not acknowledged, fenced by its lease: rollout-1")
    assert texts(pool(late), pool()) == ["engine rollout-1 left"]


def test_who_holds_which_weights_is_told_when_it_changes() -> None:
    held = W.hex()[:8]
    assert texts(pool(engine(1)), pool(engine(1))) == []
    before = pool(engine(1, weights=V), engine(2, weights=V))
    assert texts(before, pool(engine(1), engine(2))) == [f"2 engines hold weights {held}: rollout-1, rollout-2"]
    (line,) = compare(pool(labels={W: "step-0"}), pool(labels={W: "step-1"}))
    assert line.level == logging.WARNING
    assert line.text == f"weights {held} are called step-1: engines held these weights before, as step-0"
    two = [engine(1), engine(2, weights=V)]  # of two layouts
    first, second = {W: "step-1"}, {W: "step-1", V: "step-1"}
    assert texts(pool(*two, labels=first), pool(*two, labels=second)) == [f"weights {V.hex()[:8]} are called step-1"]
    (line,) = compare(pool(two[1], labels=first), pool(two[1], labels=second))
    assert line.text == f"weights {V.hex()[:8]} are called step-1: until now step-1 was the label of weights {held}"
    assert texts(pool(leading=False), pool(labels={W: "step-1"})) == ["leading: epoch 0, published 0"]


def test_engines_that_lack_tiers_are_told_once() -> None:
    def limited(number: int, note: str = "no tier is used: because") -> EngineView:
        return engine(number, tiers_off="TiersOff", tiers_note=note)

    before, after = pool(engine(1)), pool(limited(1))
    (line,) = compare(before, after)
    assert (line.level, line.text) == (logging.WARNING, "engine rollout-1 lacks tiers: no tier is used: because")
    assert texts(after, after) == []
    assert texts(after, pool(limited(1, "L2 is off: because"))) == ["engine rollout-1 lacks tiers: L2 is off: because"]
    assert texts(after, before) == []
    crowd = [engine(number) for number in range(11)]
    assert texts(pool(*crowd), pool(*(limited(number) for number in range(11))))[-1] == "11 engines lack tiers"
    assert 'epochkv_pool_tiers_off_engines{namespace="",pool="p"} 1' in exposition("p", pool(engine(2), limited(1)), {}, 30.0, 0.0)


def test_a_reset_is_overdue_after_lease_and_margin_and_only_while_it_is_open() -> None:
    open_since = pool(target=7, published=6, behind_since=100.0)
    assert [open_since.overdue_seconds(30.0, now) for now in (90.0, 132.0, 133.0, 143.0)] == [0.0, 0.0, 0.0, 10.0]
    assert [open_since.overdue_seconds(2.0, now) for now in (103.0, 104.0)] == [0.0, 1.0]  # the margin is never below 1 s
    assert replace(open_since, behind_since=None).overdue_seconds(30.0, 1e6) == 0.0


def test_newer_epochs_do_not_hide_that_a_reset_is_late() -> None:
    record = Record()
    assert record.raise_target(2, None, 100.0)
    assert record.raise_target(3, None, 120.0)
    assert (record.started_at, record.behind_since) == (120.0, 100.0)
    record.raise_published(2, 130.0)
    assert record.behind_since == 120.0
    record.raise_published(3, 131.0)
    assert record.behind_since is None
    record.raise_target(4, None, 140.0)
    record.lead(PoolRecord(target=4, published=4))  # another hub published it
    assert record.behind_since is None


def test_metrics_are_prometheus_text() -> None:
    engines = engine(1), engine(2, weights=None), engine(3, converged=False), engine(4, alive=False), engine(5, isolated=True)
    snapshot = pool(*engines, target=7, published=6, reset_seconds=0.25, behind_since=900.5, reclaimed_keys=12)
    lines = exposition("policy", snapshot, {"received": 5}, 30.0, 1000.0).splitlines()
    labels = 'namespace="",pool="policy"'
    pools = {"target_epoch": 7, "published_epoch": 6, "weights_diverged_engines": 0, "last_reset_seconds": 0.25, "reclaimed_keys": 12}
    for line in (
        *(f"epochkv_pool_{name}{{{labels}}} {value}" for name, value in {**pools, "reset_overdue_seconds": 66.5}.items()),
        *(f'epochkv_pool_engines{{{labels},state="{state}"}} 1' for state in ("sharing", "unknown", "isolated", "behind", "silent")),
        *(f"epochkv_hub_leading{{{labels}}} 1", f'epochkv_hub_messages_total{{{labels},outcome="received"}} 5'),
    ):
        assert line in lines, lines
    families = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(families) == len(set(families))


def test_the_address_that_clients_dial() -> None:
    assert advertised("tcp://127.0.0.1:7701", "tcp://127.0.0.1:0") == "tcp://127.0.0.1:7701"
    assert advertised("tcp://127.0.0.1:7701", "tcp://head-node:7701") == "tcp://head-node:7701"
    for listen in ("tcp://*:7701", "tcp://0.0.0.0:7701"):
        assert advertised("tcp://127.0.0.1:7701", listen) == f"tcp://{socket.gethostname()}:7701"


@pytest.mark.parametrize(
    "listen", ["", "7700", "tcp://host", "tcp://:7700", "tcp://h:x", "tcp://h:65536", "udp://h:1", "tcp://a b:1", "tcp://::1:7700"]
)
def test_an_address_that_is_none_is_refused(listen: str) -> None:
    with pytest.raises(ConfigurationError, match=r"it must look like tcp://0\.0\.0\.0:7700, or tcp://\[::\]:7700"):
        split_listen(listen)
    assert split_listen("tcp://[::1]:7700") == ("[::1]", 7700)
