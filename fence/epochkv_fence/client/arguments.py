"""What callers may give, checked before anything is asked: the first thing that a mistake costs is an exception."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from epochkv_fence.protocol.messages import CONTROL, MAX_EPOCH

MAX_LABEL: Final = 253
MAX_JUMP: Final = 1_000_000
"""How far above the target an epoch may be asked for without force: ten years of a reset every five minutes."""
DIGEST: Final = re.compile("[0-9a-f]{32}")


class ArgumentError(ValueError):
    """An argument cannot be meant; nothing was asked of the pool.

    Attributes:
        parameter: its name in Python; `problem` is the rest of the sentence, for those who call it something else.
    """

    def __init__(self, parameter: str, problem: str) -> None:
        super().__init__(f"{parameter} {problem}")
        self.parameter = parameter
        self.problem = problem


def check_reset(epoch: int | None, timeout_s: float, on_failure: str, progress: object) -> None:
    """Raise unless this can be asked for.

    Raises:
        ArgumentError: an argument cannot be meant.
    """
    if epoch is not None:
        _check_epoch(epoch, ", or None for the next one")
    check_timeout(timeout_s)
    if on_failure not in ("bypass", "crash"):
        raise ArgumentError("on_failure", f"is {on_failure!r}; use 'bypass' or 'crash'")
    _check_progress(progress, "Standing")


def check_wait(epoch: int, timeout_s: float, progress: object) -> None:
    """Raise unless this epoch can be waited for: None is one only where the next one is asked for."""
    _check_epoch(epoch)
    check_timeout(timeout_s)
    _check_progress(progress, "Standing")


def check_weights(
    engines: Iterable[str] | None, timeout_s: float, label: str | None, other_than: Iterable[str], progress: object
) -> tuple[frozenset[str] | None, frozenset[str]]:
    """Names of engines (None: all) and digests, as sets.

    Raises:
        ArgumentError: an argument cannot be meant.
    """
    check_timeout(timeout_s)
    if label is not None:
        _check_label(label)
    _check_progress(progress, "WeightsStanding")
    names = None if engines is None else _texts("engines", engines, "give names of engines, or None for all")
    digests = _texts("other_than", other_than, "give digests of weights, such as the ids of a WeightsReport")
    if names is not None and not names:
        raise ArgumentError("engines", "is empty; give names of engines, or None for all")
    for digest in digests:
        if DIGEST.fullmatch(digest) is None:
            raise ArgumentError("other_than", f"has {digest!r}; give digests of 32 hex digits, such as the ids of a WeightsReport")
    return names, digests


def _texts(parameter: str, given: Iterable[str], remedy: str) -> frozenset[str]:
    found = list(given) if isinstance(given, Iterable) else [given]
    if isinstance(given, (str, bytes)) or not all(isinstance(text, str) for text in found):
        raise ArgumentError(parameter, f"is {given!r}; {remedy}")
    return frozenset(found)


def _check_progress(progress: object, standing: str) -> None:
    if progress is not None and not callable(progress):
        raise ArgumentError("progress", f"is {progress!r}; give a function that takes a {standing}, or None")


def _check_epoch(epoch: int, otherwise: str = "") -> None:
    if isinstance(epoch, bool) or not isinstance(epoch, int) or not 0 <= epoch <= MAX_EPOCH:
        raise ArgumentError("epoch", f"is {epoch!r}; give an integer from 0 to {MAX_EPOCH}{otherwise}")


def _check_label(label: str) -> None:
    if not isinstance(label, str) or not 0 < len(label) <= MAX_LABEL:
        raise ArgumentError("label", f"is {label!a:.64}; give text of 1 to {MAX_LABEL} characters")
    try:
        label.encode()
    except UnicodeEncodeError as error:
        raise ArgumentError("label", f"is {label!a}, which is no Unicode text; give characters that can be encoded") from error
    if CONTROL.search(label):
        raise ArgumentError("label", f"is {label!a}; give one line without control characters, such as step-42")


def check_timeout(timeout_s: float) -> None:
    """Raise `ArgumentError` unless so many seconds can be waited for."""
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not 0 < timeout_s <= 86_400:
        raise ArgumentError("timeout_s", f"is {timeout_s!r}; give seconds, more than 0 and at most 86400")


def check_jump(epoch: int, target: int) -> None:
    """Raise for an epoch that can only be a slip of the hand: a target never goes down again, and epochs end at 2^53 - 1."""
    if epoch - target > MAX_JUMP:
        problem = f"is {epoch}, and the pool's target is {target}; a target never goes down again, so a jump of more than {MAX_JUMP} needs"
        raise ArgumentError("epoch", f"{problem} force. Nothing was asked of the pool")
