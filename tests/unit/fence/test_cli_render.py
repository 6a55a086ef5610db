"""What `epochkv` prints: tables, and numbers as people say them."""

import json
import re
from dataclasses import replace

import pytest

from epochkv_fence.cli.render import (
    Output,
    StatusLine,
    push_waits_for,
    reset_waits_for,
    show_engines,
    show_reset,
    show_status,
    show_wait,
    show_weights,
    shown_weights,
)
from epochkv_fence.client import Engine, PoolStatus, Reset, Standing, UnknownWeights, WeightsGroup, WeightsReport, WeightsStanding


# ------------------------------------------------------------------------------------------------------------------ status
def status(**changes: object) -> PoolStatus:
    return replace(PoolStatus("policy", "u-1", 3, 3, "Trainer", 30.0, ()), **changes)  # type: ignore[arg-type]


ENGINE = Engine("e1" * 16, "a", "a", "", 0, 3, "sharing", 0, 9.0, 0.0, "fp", "0a" * 16, "", 7.0)


def test_status_counts_engines_by_what_they_hold(capsys: pytest.CaptureFixture[str]) -> None:
    other, sleeper = replace(ENGINE, name="b", weights="3f" * 16), replace(ENGINE, name="c", state="unknown", weights="", weights_note="?")
    show_status(status(engines=(ENGINE, replace(ENGINE, name="d"), other, sleeper), labels={"3f" * 16: "step-42"}), Output.TABLE)
    text = capsys.readouterr().out
    assert re.search(r"^weights +0a0a0a0a 2 engines; 3f3f3f3f \(step-42\) 1 engine; unknown 1 engine *$", text, re.M)
    assert re.search(r"^engines +4: 3 in use, 0 isolated, 1 of unknown weights, 0 behind *$", text, re.M)
    assert "hub  " not in text
    alone = replace(ENGINE, state="isolated")
    show_status(status(engines=(alone,), settling_seconds=12.3), Output.TABLE)
    text = capsys.readouterr().out
    assert re.search(r"^engines +1: 0 in use, 1 isolated, 0 of unknown weights, 0 behind *$", text, re.M)
    assert re.search(r"^isolated +a: its names of this epoch are given up; it has asked for the next epoch *$", text, re.M)
    assert re.search(r"^hub +became leader just now; the list of engines is complete in 12 s *$", text, re.M)


def test_engines_that_lack_tiers_are_named_with_what_to_change(capsys: pytest.CaptureFixture[str]) -> None:
    limited = replace(ENGINE, name="b", tiers_off="SavesOnly", tiers_note="loads are off: because")
    show_status(status(engines=(ENGINE, limited)), Output.TABLE)
    assert re.search(r"^tiers +b: loads are off: because *$", capsys.readouterr().out, re.M)
    show_status(status(engines=(ENGINE,)), Output.TABLE)
    assert "tiers" not in capsys.readouterr().out

    def note(engine: Engine) -> str:
        show_engines(status(engines=(engine,)), Output.TABLE)
        rows = capsys.readouterr().out.splitlines()[1:]
        return " ".join(row[rows[0].index("e1e1e1e1") + 8 :].strip() for row in rows).strip()

    assert note(limited) == "loads are off: because"
    unknown = replace(limited, weights="", state="unknown", weights_note="asleep")
    assert note(unknown) == "asleep; loads are off: because"
    assert note(replace(unknown, tiers_note="the engine serves without caches: asleep")) == "the engine serves without caches: asleep"
    assert note(replace(limited, tiers_note="", tiers_off="Later")) == "Later"
    show_engines(status(engines=(limited,)), Output.JSON)
    assert json.loads(capsys.readouterr().out)[0]["tiers_note"] == "loads are off: because"


def test_weights_of_two_fingerprints_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    narrow, wide = WeightsGroup("0a" * 16, "", ("a", "b"), 192.0, "1111111122"), WeightsGroup("3f" * 16, "step-42", ("c",), 4.0, "2222")
    report = WeightsReport((narrow, wide), (UnknownWeights("d", ""),))
    show_weights(report, Output.TABLE)
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["WEIGHTS", "LABEL", "ENGINES", "SINCE", "FINGERPRINT", "NAMES"],
        ["0a0a0a0a", "-", "2", "3m12s", "11111111", "a,", "b"],
        ["3f3f3f3f", "step-42", "1", "4s", "2222", "c"],
        ["unknown", "-", "1", "-", "-", "d"],
    ]
    assert shown_weights(report) == "all 2 engines hold 0a0a0a0a\nthe only engine holds 3f3f3f3f (step-42)"
    assert (report.equal, replace(report, unknown=()).equal) == (False, True)
    show_weights(WeightsReport((wide,)), Output.TABLE)
    assert "FINGERPRINT" not in capsys.readouterr().out


# ----------------------------------------------------------------------------------------------------------------- waiting


RESET = Reset(7, True, 1.5, 2, (), 0, False)


@pytest.mark.parametrize(
    ("reset", "said"),
    [
        (RESET, "no engine of 2 uses an older one"),
        (replace(RESET, engines=1), "the only engine does not use an older one"),
        (replace(RESET, engines=0), "no engine is connected"),
        (replace(RESET, old_epoch_requests=1), "1 running request continues with what it held"),
        (replace(RESET, old_epoch_requests=2), "2 running requests continue with what they held"),
        (replace(RESET, laggards=("a",)), "fenced by its lease: a\n"),
        (replace(RESET, laggards=("a", "b")), "fenced by their leases: a, b\n"),
    ],
)
def test_numbers_read_as_people_say_them(capsys: pytest.CaptureFixture[str], reset: Reset, said: str) -> None:
    show_reset(reset, Output.TABLE)
    assert said in capsys.readouterr().out
    show_wait(reset, Output.TABLE)
    text = capsys.readouterr().out
    assert said in text
    assert text.startswith("epoch 7 is published: ")
    assert "(waited 1.5 s)" in text


def test_an_epoch_that_was_published_before_is_said_to_reset_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    show_reset(replace(RESET, noop=True), Output.TABLE)
    assert "epoch 7 was published before, so nothing was reset" in capsys.readouterr().out


def test_progress_is_silent_at_first(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it was made long ago, before the command of an update."""
    now = [100.0]
    monkeypatch.setattr("epochkv_fence.cli.render.time.monotonic", lambda: now[0])
    progress = StatusLine(reset_waits_for)
    for now[0], said in ((200.0, ""), (201.9, ""), (202.0, "epochkv: epoch 1: waiting for 1 of 4 engines\n"), (203.0, "")):
        progress(Standing(1, True, False, 4, 1))
        assert capsys.readouterr().err == said


def test_progress_counts_engines() -> None:
    assert reset_waits_for(Standing(1, True, False, 1, 1)) == "epoch 1: waiting for 1 of 1 engine"
    assert reset_waits_for(Standing(1, True, False, 4, 3)) == "epoch 1: waiting for 3 of 4 engines"
    names = tuple(f"engine-{number}" for number in range(12))
    text = push_waits_for(WeightsStanding(WeightsReport(()), names, "they do not"))
    assert text == f"waiting for the new weights of {', '.join(names[:10])} and 2 more"
    nobody = WeightsStanding(WeightsReport(()), (), "a hub starts")
    assert push_waits_for(nobody) == "waiting: a hub starts"
