"""What callers may give, checked before anything is asked or pushed: the first thing that a mistake costs is an exception."""

from __future__ import annotations

import inspect
from typing import Final

from epochkv_fence.messages import CONTROL, MAX_EPOCH
from epochkv_fence.versions import FAILED, MAX_VERSION

"""What the version of weights begins with whose push failed."""
MAX_JUMP: Final = 1_000_000
"""How far above the target an epoch may be asked for without force: ten years of a reset every five minutes."""


class ArgumentError(ValueError):
    """An argument cannot be meant; nothing was asked of the pool.

    Attributes:
        parameter: its name in Python; `problem` is the rest of the sentence, for those who call it something else.
    """

    def __init__(self, parameter: str, problem: str) -> None:
        super().__init__(f"{parameter} {problem}")
        self.parameter = parameter
        self.problem = problem


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument is of another type."""


def check_arguments(epoch: int | None, version: str | None, timeout_s: float, on_failure: str, progress: object = None) -> str:
    """The version as text.

    Raises:
        ArgumentError: an argument cannot be meant.
    """
    if epoch is not None:
        _check_epoch(epoch, ", or None for the next one")
    check_timeout(timeout_s)
    _check_choice("on_failure", on_failure, "bypass", "crash")
    name = check_version(version, "weights_version") if version is not None else ""
    if progress is not None:
        _check_progress(progress)
    return name


def check_wait(epoch: int, timeout_s: float, progress: object) -> None:
    """Raise unless this epoch can be waited for: None is one only where the next one is asked for."""
    _check_epoch(epoch)
    check_arguments(epoch, None, timeout_s, "crash", progress)


def check_flags(**flags: object) -> None:
    """Raise for what is neither True nor False: most other values would count as True, also the text "no"."""
    for parameter, value in flags.items():
        if not isinstance(value, bool):
            raise ArgumentTypeError(parameter, f"is {value!r}; give True or False")


def _check_progress(progress: object) -> None:
    if not callable(progress):
        raise ArgumentTypeError("progress", f"is {progress!r}; give a function that takes a Standing, or None")
    if inspect.iscoroutinefunction(progress) or inspect.iscoroutinefunction(type(progress).__call__):
        raise ArgumentTypeError("progress", f"is {progress!r}, and nobody would await it; give a plain function that takes a Standing")


def _check_epoch(epoch: int, otherwise: str = "") -> None:
    if isinstance(epoch, bool) or not isinstance(epoch, int):
        raise ArgumentTypeError("epoch", f"is {epoch!r}; give an integer from 0 to {MAX_EPOCH}{otherwise}")
    if not 0 <= epoch <= MAX_EPOCH:
        raise ArgumentError("epoch", f"is {epoch}; it must be from 0 to {MAX_EPOCH}")


def check_version(version: str, parameter: str = "version") -> str:
    """Raise unless `version`, which the caller gave as `parameter`, can name weights."""
    if not isinstance(version, str):
        raise ArgumentTypeError(parameter, f"is {version!r}; give text")
    if not 0 < len(version) <= MAX_VERSION:
        raise ArgumentError(parameter, f"has {len(version)} characters; give 1 to {MAX_VERSION}")
    try:
        version.encode()
    except UnicodeEncodeError as error:
        raise ArgumentError(parameter, f"is {version!a}, which is no Unicode text; give characters that can be encoded") from error
    if CONTROL.search(version):
        raise ArgumentError(parameter, f"is {version!a}; give one line without control characters, such as step-42")
    if version.startswith(FAILED):
        raise ArgumentError(parameter, f"is {version!r}, and {FAILED!r} is how status shows weights whose push failed; give another name")
    return version


def check_timeout(timeout_s: float) -> None:
    """Raise unless `timeout_s` is a usable number of seconds."""
    problem = f"is {timeout_s!r}; give seconds, more than 0 and at most 86400"
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)):
        raise ArgumentTypeError("timeout_s", problem)
    if not 0 < timeout_s <= 86_400:
        raise ArgumentError("timeout_s", problem)


def check_order(order: str) -> None:
    """Raise unless `order` is one of the two safe ones."""
    _check_choice("order", order, "push_under_pause", "fence_first")


def _check_choice(parameter: str, value: str, one: str, other: str) -> None:
    problem = f"is {value!r}; use {one!r} or {other!r}"
    if not isinstance(value, str):
        raise ArgumentTypeError(parameter, problem)
    if value not in (one, other):
        raise ArgumentError(parameter, problem)


def check_jump(epoch: int, target: int) -> None:
    """Raise for an epoch that can only be a slip of the hand: a target never goes down again, and epochs end at 2^53 - 1."""
    if epoch - target > MAX_JUMP:
        problem = f"is {epoch}, and the pool's target is {target}; a target never goes down again, so a jump of more than {MAX_JUMP} needs"
        raise ArgumentError("epoch", f"{problem} force. Nothing was asked of the pool")
