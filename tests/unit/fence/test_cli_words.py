"""What `epochkv` and the client say: every sentence names what the caller gave, and numbers read as people say them."""

from __future__ import annotations

import asyncio
import json
import re
import threading
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
    wait_waits_for,
)
from epochkv_fence.client import (
    ArgumentError,
    AsyncPool,
    Engine,
    PoolStatus,
    Reset,
    ResetTimeout,
    Standing,
    UnknownWeights,
    WeightsGroup,
    WeightsReport,
    WeightsStanding,
)
from tests.support.cli import inside
from tests.support.hub import HubWorld

# ------------------------------------------------------------------------------------------------------------- the command


def test_version_and_short_help(capsys: pytest.CaptureFixture[str]) -> None:
    status, text, _ = inside(capsys, "--version")
    assert (status, re.fullmatch(r"epochkv \d+\.\d+\.\d+\n", text) is not None) == (0, True)
    for command in ("", "reset", "wait", "hub", "update", "keys", "keys rotate"):
        status, text, errors = inside(capsys, *command.split(), "-h")
        assert (status, errors) == (0, ""), command
        assert text.lstrip().startswith(f"Usage: epochkv {command}".rstrip())


@pytest.mark.parametrize(
    ("arguments", "parameter", "option"),
    [
        (("reset", "--timeout", "0"), "timeout_s is 0.0", "--timeout is 0.0"),
        (("wait", "1", "--timeout", "-3"), "timeout_s is -3.0", "--timeout is -3.0"),
        (("status", "--timeout", "nan"), "timeout_s is nan", "--timeout is nan"),
        (("reset", "--on-failure", "pray"), "on_failure is", "--on-failure is 'pray'"),
        (("update", "--version", "", "--", "true"), "label has", "--version has 0 characters"),
        (("reset", "--epoch", str(2**53)), " epoch is", f"--epoch is {2**53}"),
    ],
)
def test_the_command_line_names_options_as_they_were_given(
    world: HubWorld, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], parameter: str, option: str
) -> None:
    status, _, errors = inside(capsys, arguments[0], "--config", str(world.folder), *arguments[1:])
    assert status == 2
    assert errors.startswith(f"epochkv: {option}")
    assert parameter not in errors


def test_python_names_parameters_as_they_were_given(world: HubWorld) -> None:
    pool = world.connect()
    for arguments, parameter in (
        ({"timeout_s": 0}, "timeout_s"),
        ({"epoch": -1}, "epoch"),
        ({"on_failure": "x"}, "on_failure"),
    ):
        with pytest.raises(ArgumentError, match=f"^{parameter} is ") as caught:
            pool.reset(**arguments)  # type: ignore[arg-type]
        assert caught.value.parameter == parameter
    with pytest.raises(ArgumentError, match=r"^label is 'a"):
        with pool.weight_update("a\nb"):
            raise AssertionError("must not begin")
    assert world.snapshot().target == 0


@pytest.mark.parametrize(
    ("parameter", "value", "calls"),
    [
        ("timeout_s", "5", "status engines weights reset wait weight_update wait_weights"),
        ("timeout_s", None, "reset wait"),
        ("timeout_s", True, "reset wait"),
        ("on_failure", 1, "reset"),
        ("progress", 5, "reset wait weight_update wait_weights"),
    ],
)
def test_a_wrong_type_is_a_type_error_also(world: HubWorld, parameter: str, value: object, calls: str) -> None:
    first = {"wait": (1,), "weight_update": ("step-1",)}

    def said(caught: pytest.ExceptionInfo[TypeError]) -> None:
        assert isinstance(caught.value, ArgumentError)
        assert caught.value.parameter == parameter
        assert str(caught.value).startswith(f"{parameter} is {value!r}; ")

    async def awaited(call: str) -> None:
        async with await AsyncPool.connect(world.folder) as other:
            made = getattr(other, call)(*first.get(call, ()), **{parameter: value})
            if call == "weight_update":
                await made.__aenter__()
            else:
                await made

    def called(call: str) -> None:
        made = getattr(pool, call)(*first.get(call, ()), **{parameter: value})
        if call == "weight_update":
            made.__enter__()

    pool = world.connect()
    for call in calls.split():
        with pytest.raises(TypeError) as caught:
            called(call)
        said(caught)
        with pytest.raises(TypeError) as caught:
            asyncio.run(awaited(call))
        said(caught)
    assert world.snapshot().target == 0


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
    show_status(status(settling_seconds=12.3), Output.TABLE)
    text = capsys.readouterr().out
    assert re.search(r"^weights +- *$", text, re.M)
    assert re.search(r"^hub +has only begun to lead; it may not know every engine for another 12 s *$", text, re.M)


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


# -------------------------------------------------------------------------------------------------------------- arguments


def test_an_epoch_that_can_only_be_a_slip_is_refused_unless_forced(world: HubWorld, capsys: pytest.CaptureFixture[str]) -> None:
    pool = world.connect()
    assert pool.reset(epoch=1_000_000).published
    with pytest.raises(ArgumentError, match=r"epoch is 2000001, and the pool's target is 1000000; a target never goes down again"):
        pool.reset(epoch=2_000_001)
    config = ("--config", str(world.folder))
    code, _, errors = inside(capsys, "reset", *config, "--epoch", "999999999999")
    assert (code, errors.startswith("epochkv: --epoch is 999999999999, and the pool's target is 1000000")) == (2, True)
    assert "force" in errors
    assert world.snapshot().target == 1_000_000
    assert pool.reset(epoch=2_000_000).epoch == 2_000_000
    assert pool.reset(epoch=5).noop  # below the target, however far
    assert inside(capsys, "reset", *config, "--epoch", "4000000", "--force")[0] == 0
    assert pool.reset(epoch=9_000_000, force=True).epoch == 9_000_000

    async def body() -> int:
        async with await AsyncPool.connect(world.folder) as other:
            with pytest.raises(ArgumentError, match=r"epoch is 20000000, .* needs force"):
                await other.reset(epoch=20_000_000)
            return (await other.reset(epoch=20_000_000, force=True)).epoch

    assert asyncio.run(body()) == 20_000_000


# ----------------------------------------------------------------------------------------------------------------- waiting


def test_waiting_for_what_nobody_asked_for(world: HubWorld) -> None:
    pool = world.connect()
    told: list[Standing] = []
    with pytest.raises(ResetTimeout, match=r"epoch 7 is not published after 0\.3 s: nobody has asked for it \(the target is 0\)") as caught:
        pool.wait(7, timeout_s=0.3, progress=told.append)
    assert "Waiting asks for nothing; a reset does" in str(caught.value)
    assert told
    text = wait_waits_for(told[0])
    assert text == "epoch 7: waiting for somebody to ask for it"
    assert reset_waits_for(told[0]) == "epoch 7: waiting for a hub to record it"


def test_waiting_names_those_that_are_late(world: HubWorld) -> None:
    ((_, engine),) = world.serving(1)
    engine.is_busy = True
    pool = world.connect()
    pool.reset(wait=False)
    told: list[Standing] = []
    named = threading.Event()

    def tell(standing: Standing) -> None:
        told.append(standing)
        if standing.names:
            named.set()
            engine.is_busy = False

    assert pool.wait(1, timeout_s=25, progress=tell).published
    assert named.is_set()
    texts = [wait_waits_for(standing) for standing in told]
    assert texts[0] == "epoch 1: waiting for the proof"
    assert "epoch 1: waiting for engine-0" in texts


RESET = Reset(7, True, 1.5, 2, (), 0, False)


@pytest.mark.parametrize(
    ("reset", "said"),
    [
        (RESET, "no engine of 2 uses an older one"),
        (replace(RESET, engines=1), "the only engine does not use an older one"),
        (replace(RESET, engines=0), "no engine is connected"),
        (replace(RESET, old_epoch_requests=1), "1 running request continues with what it held"),
        (replace(RESET, old_epoch_requests=2), "2 running requests continue with what they held"),
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
    nobody = WeightsStanding(WeightsReport(()), (), "the hub has only begun to lead")
    assert push_waits_for(nobody) == "waiting: the hub has only begun to lead"
