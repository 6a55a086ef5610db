"""What callers may give, checked before anything is asked or pushed: the first thing that a mistake costs is an exception."""

from __future__ import annotations

from typing import Final

from epochkv_fence.messages import CONTROL, MAX_EPOCH

MAX_VERSION: Final = 253


def check_arguments(epoch: int | None, version: str | None, timeout_s: float, on_failure: str) -> str:
    """The version as text.

    Raises:
        ValueError, TypeError: an argument cannot be meant.
    """
    if epoch is not None:
        if isinstance(epoch, bool) or not isinstance(epoch, int):
            raise TypeError(f"epoch is {epoch!r}; give an integer, or None for the next one")
        if not 0 <= epoch <= MAX_EPOCH:
            raise ValueError(f"epoch is {epoch}; it must be from 0 to {MAX_EPOCH}")
    check_timeout(timeout_s)
    if on_failure not in ("bypass", "crash"):
        raise ValueError(f"on_failure is {on_failure!r}; use 'bypass' or 'crash'")
    return check_version(version) if version is not None else ""


def check_version(version: str) -> str:
    """Raise unless `version` can name weights."""
    if not isinstance(version, str):
        raise TypeError(f"the version of the weights is {version!r}; give text")
    if not 0 < len(version) <= MAX_VERSION:
        raise ValueError(f"the version of the weights has {len(version)} characters; give 1 to {MAX_VERSION}")
    try:
        version.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the version of the weights is {version!a}, which is no Unicode text; give characters that can be encoded"
        ) from error
    if CONTROL.search(version):
        raise ValueError(f"the version of the weights is {version!a}; give one line without control characters, such as step-42")
    return version


def check_timeout(timeout_s: float) -> None:
    """Raise unless `timeout_s` is a usable number of seconds."""
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not 0 < timeout_s <= 86_400:
        raise ValueError(f"timeout_s is {timeout_s!r}; give seconds, more than 0 and at most 86400")


def check_order(order: str) -> None:
    """Raise unless `order` is one of the two safe ones."""
    if order not in ("push_under_pause", "fence_first"):
        raise ValueError(f"order is {order!r}; use 'push_under_pause' or 'fence_first'")
