"""Warnings that repeat: each kind once a minute, and how many there were."""

from __future__ import annotations

import logging

import pytest

from epochkv_connector.store.queues import AGAIN_SECONDS, Notices


def test_each_kind_is_said_once_a_minute_with_what_was_left_out(caplog: pytest.LogCaptureFixture) -> None:
    now = [1000.0]
    notices = Notices(logging.getLogger("epochkv_connector.test"), lambda: now[0])

    def say(kind: str) -> list[str]:
        caplog.clear()
        notices.say(kind, "loads failed: %s", kind)
        return [record.getMessage() for record in caplog.records]

    assert say("gone") == ["loads failed: gone"]
    assert say("late") == ["loads failed: late"]
    now[0] += AGAIN_SECONDS - 1
    assert say("gone") == say("gone") == []
    now[0] += 1
    assert say("gone") == ["loads failed: gone (and 2 more since it was said last)"]
    assert say("gone") == []
    notices.forget()
    assert say("gone") == ["loads failed: gone"]
