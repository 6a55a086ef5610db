"""What `epochkv` and the client say: every sentence names what the caller gave, and numbers read as people say them."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from epochkv_fence.cli.render import Output, Progress, show_reset, show_status, show_wait
from epochkv_fence.client import ArgumentError, AsyncPool, OpenUpdate, Pool, PoolStatus, Reset, ResetTimeout, Standing, UpdateInProgress
from epochkv_fence.versions import FAILED, failed_version
from tests.helpers_cli import inside
from tests.helpers_hub import HubWorld, epochkv, hub_world


@pytest.fixture
def world(tmp_path: Path) -> Iterator[HubWorld]:
    with hub_world(tmp_path / "state", join_after_seconds=0.0) as made:
        yield made


# ------------------------------------------------------------------------------------------------------------- the command


def test_version_and_short_help(capsys: pytest.CaptureFixture[str]) -> None:
    status, text, _ = inside(capsys, "--version")
    assert (status, re.fullmatch(r"epochkv \d+\.\d+\.\d+\n", text) is not None) == (0, True)
    for command in ("", "reset", "wait", "hub", "update", "keys", "keys rotate"):
        status, text, errors = inside(capsys, *command.split(), "-h")
        assert (status, errors) == (0, ""), command
        assert text.lstrip().startswith(f"Usage: epochkv {command}".rstrip())


def test_help_says_what_a_version_of_weights_means(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(inside(capsys, "reset", "-h")[1].split())
    assert "It says that they have been pushed: engines older than joinAfterSeconds share." in text
    assert "While a weight update is open it is a label only, and lets nobody share." in text
    assert "While a weight update is open it is a label only." in " ".join((Pool.reset.__doc__ or "").split())


@pytest.mark.parametrize(
    ("arguments", "parameter", "option"),
    [
        (("reset", "--timeout", "0"), "timeout_s is 0.0", "--timeout is 0.0"),
        (("wait", "1", "--timeout", "-3"), "timeout_s is -3.0", "--timeout is -3.0"),
        (("status", "--timeout", "nan"), "timeout_s is nan", "--timeout is nan"),
        (("reset", "--on-failure", "pray"), "on_failure is", "--on-failure is 'pray'"),
        (("reset", "--weights-version", ""), "weights_version has", "--weights-version has 0 characters"),
        (("update", "--version", "", "--", "true"), " version has", "--version has 0 characters"),
        (("update", "--version", "v", "--order", "x", "--", "true"), " order is", "--order is 'x'"),
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
        ({"weights_version": "a\nb"}, "weights_version"),
        ({"epoch": -1}, "epoch"),
        ({"on_failure": "x"}, "on_failure"),
    ):
        with pytest.raises(ArgumentError, match=f"^{parameter} is ") as caught:
            pool.reset(**arguments)  # type: ignore[arg-type]
        assert caught.value.parameter == parameter
    with pytest.raises(ArgumentError, match=r"^version is 'a"):
        with pool.weight_update("a\nb"):
            raise AssertionError("must not begin")
    assert world.snapshot().target == 0


@pytest.mark.parametrize(
    ("parameter", "value", "calls"),
    [
        ("timeout_s", "5", "status engines reset wait weight_update"),
        ("timeout_s", None, "reset wait"),
        ("timeout_s", True, "reset wait"),
        ("on_failure", 1, "reset weight_update"),
        ("order", None, "weight_update"),
        ("progress", 5, "reset wait weight_update"),
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


def test_another_trainers_update_has_a_status_of_its_own(world: HubWorld, tmp_path: Path) -> None:
    pool = world.connect()
    with pool.weight_update("step-1"):
        done = epochkv("update", "--version", "step-2", "--", "touch", str(tmp_path / "pushed"), config=world.folder)
    assert done.returncode == 75
    assert "has had an update to 'step-1' open since" in done.stderr
    assert not (tmp_path / "pushed").exists()
    assert epochkv("update", "--version", "step-2", "--", "true", config=world.folder).returncode == 0


def test_an_update_that_is_refused_on_entry_has_pushed_nothing(world: HubWorld) -> None:
    one, other = world.connect(), world.connect()
    with one.weight_update("step-1"):
        with pytest.raises(UpdateInProgress) as caught:
            with other.weight_update("step-2"):
                raise AssertionError("must not begin")
    assert caught.value.pushed is False


# ------------------------------------------------------------------------------------------------------------------ status


def test_status_shows_the_update_that_is_open(world: HubWorld, capsys: pytest.CaptureFixture[str]) -> None:
    pool = world.connect()
    assert pool.status().update is None
    with pool.weight_update("step-42"):
        found = pool.status().update
        assert found is not None
        assert found.version == "step-42"
        assert re.fullmatch(r"process \d+ on .+", found.holder)
        assert 0 <= found.since_seconds < 60
        assert 0 < found.left_seconds <= 33
        _, text, _ = inside(capsys, "status", "--config", str(world.folder), "-o", "json")
        shown = json.loads(text)["update"]
        assert set(shown) == {"holder", "version", "since_seconds", "left_seconds"}
        assert (shown["holder"], shown["version"]) == (found.holder, "step-42")
        _, text, _ = inside(capsys, "status", "--config", str(world.folder))
        assert re.search(r"^update +to step-42, open for \d+s by process \d+ on \S+; ends in \d+s unless that trainer goes on", text, re.M)
    assert pool.status().update is None


def status(**changes: object) -> PoolStatus:
    return replace(PoolStatus("policy", "u-1", 3, 3, "v", "Trainer", 30.0, ()), **changes)  # type: ignore[arg-type]


def test_a_long_update_fits_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    show_status(status(update=OpenUpdate("process 7 on node", "step-42", 3723.0, 21.5)), Output.TABLE)
    assert "to step-42, open for 1h02m by process 7 on node; ends in 21s unless that trainer goes on" in capsys.readouterr().out
    show_status(status(), Output.TABLE)
    assert re.search(r"^update +- *$", capsys.readouterr().out, re.M)


# -------------------------------------------------------------------------------------------------------------- arguments


def test_names_that_status_gives_to_failed_pushes_are_refused(world: HubWorld) -> None:
    assert failed_version("v", "1").startswith(FAILED)
    pool = world.connect()
    with pytest.raises(ArgumentError, match="weights_version is 'failed: step-1', and 'failed: ' is how status shows weights whose push"):
        pool.reset(weights_version="failed: step-1")
    with pytest.raises(ArgumentError, match="give another name"):
        with pool.weight_update("failed: step-1"):
            raise AssertionError("must not begin")
    done = epochkv("update", "--version", "failed: x", "--", "true", config=world.folder)
    assert (done.returncode, done.stderr.startswith("epochkv: --version is 'failed: x'")) == (2, True)
    assert world.snapshot().target == 0
    with pytest.raises(RuntimeError):
        with pool.weight_update("step-1"):
            raise RuntimeError("the push failed")
    assert pool.status().weights_version.startswith("failed: step-1 ")


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
    text = Progress(quiet=True, asks=False)._text(told[0])
    assert text == "epoch 7: waiting for somebody to ask for it"
    assert Progress(quiet=True)._text(told[0]) == "epoch 7: waiting for a hub to record it"


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
    texts = [Progress(quiet=True, asks=False)._text(standing) for standing in told]
    assert texts[0] == "epoch 1: waiting for the proof"
    assert "epoch 1: waiting for engine-0" in texts


RESET = Reset(7, True, 1.5, 2, (), 0, False, 0)


@pytest.mark.parametrize(
    ("reset", "said"),
    [
        (RESET, "no engine of 2 uses an older one"),
        (replace(RESET, engines=1), "the only engine does not use an older one"),
        (replace(RESET, engines=0), "no engine is there that could use an older one"),
        (replace(RESET, carried=1), "1 running request goes on with what it held"),
        (replace(RESET, carried=2), "2 running requests go on with what they held"),
        (replace(RESET, bypassed=1), "1 engine serves without reuse: nobody said that it has the weights of epoch 7"),
        (replace(RESET, bypassed=2), "2 engines serve without reuse: nobody said that they have the weights of epoch 7"),
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
    progress = Progress(quiet=False)
    for now[0], said in ((200.0, ""), (201.9, ""), (202.0, "epochkv: epoch 1: waiting for 1 of 4 engines\n"), (203.0, "")):
        progress(Standing(1, True, False, 4, 1, 0))
        assert capsys.readouterr().err == said


def test_progress_counts_engines() -> None:
    progress = Progress(quiet=True)
    assert progress._text(Standing(1, True, False, 1, 1, 0)) == "epoch 1: waiting for 1 of 1 engine"
    assert progress._text(Standing(1, True, False, 4, 3, 0)) == "epoch 1: waiting for 3 of 4 engines"
    assert progress._text(Standing(1, True, True, 4, 0, 1)) == "epoch 1 published; waiting for 1 engine to share it"
    assert progress._text(Standing(1, True, True, 4, 0, 2)) == "epoch 1 published; waiting for 2 engines to share it"
