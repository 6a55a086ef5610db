"""What callers may give, checked before anything is asked: the first thing that a mistake costs is an exception."""

import re
from collections.abc import Iterable
from typing import Final

from epochkv_fence.protocol.messages import MAX_EPOCH, MAX_EPOCH_STEP, MAX_NAME

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

    def __reduce__(self) -> tuple[object, ...]:  # as of `PoolError`
        return type(self).__new__, (type(self), *self.args), vars(self)


def _need(fits: bool, parameter: str, given: object, remedy: str) -> None:
    if not fits:
        raise ArgumentError(parameter, f"is {given!a:.300}; {remedy}")


def check_timeout(timeout_s: float) -> None:
    """Raise `ArgumentError` unless so many seconds can be waited for."""
    fits = isinstance(timeout_s, (int, float)) and 0 < timeout_s <= 86_400
    _need(fits, "timeout_s", timeout_s, "give seconds, more than 0 and at most 86400")


def check_epoch(epoch: int, otherwise: str = "") -> None:
    """Raise `ArgumentError` unless there can be this epoch."""
    fits = isinstance(epoch, int) and not isinstance(epoch, bool) and 0 <= epoch <= MAX_EPOCH
    _need(fits, "epoch", epoch, f"give an integer from 0 to {MAX_EPOCH}{otherwise}")


def check_reset(epoch: int | None, timeout_s: float, on_failure: str) -> None:
    """Raise `ArgumentError` unless this can be asked for."""
    if epoch is not None:
        check_epoch(epoch, ", or None for the next one")
    check_timeout(timeout_s)
    _need(on_failure in ("bypass", "crash"), "on_failure", on_failure, "use 'bypass' or 'crash'")


def check_weights(
    engines: Iterable[str] | None, timeout_s: float, label: str | None, other_than: Iterable[str]
) -> tuple[frozenset[str] | None, frozenset[str]]:
    """Names of engines (None: all) and digests, as sets. Raises `ArgumentError`: an argument cannot be meant."""
    check_timeout(timeout_s)
    if label is not None:
        fits = isinstance(label, str) and 0 < len(label) <= MAX_NAME and label.isprintable()
        _need(fits, "label", label, f"give one printable line of 1 to {MAX_NAME} characters, such as step-42")
    names = None if engines is None or isinstance(engines, str) else frozenset(engines)
    _need(engines is None or bool(names), "engines", engines, "give names of engines, or None for all")
    digests = frozenset(other_than)
    fits = not isinstance(other_than, str) and all(DIGEST.fullmatch(digest) for digest in digests)
    _need(fits, "other_than", other_than, "give digests of 32 hex digits, such as the ids of a WeightsReport")
    return names, digests


def check_jump(epoch: int, target: int, force: bool) -> None:
    """Raise for an epoch that can only be a slip of the hand, or that no hub takes: a target never goes down again, and epochs end."""
    if (jump := epoch - target) > (MAX_EPOCH_STEP if force else MAX_JUMP):
        problem = f"is {epoch}, and the pool's target is {target}; a target never goes down again, so a jump of more than"
        limit = f"{MAX_JUMP} needs force" if jump <= MAX_EPOCH_STEP else f"{MAX_EPOCH_STEP} is refused, with force, too"
        raise ArgumentError("epoch", f"{problem} {limit}. Nothing was asked of the pool")
