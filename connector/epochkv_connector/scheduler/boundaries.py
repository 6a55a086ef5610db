"""When a running request can complete its next block, so that a step looks only at those that may have.

A step of the scheduler takes about 10 us of CPU for each running request. Looking at every one of them added a tenth to that, and
15 of 16 have no new block. A request gets at most so many new tokens a step, so the first step in which its
next block can be complete is known when the last one was found. It is never late: the number of new tokens is an upper
bound, and whoever was due and not scheduled stays due.
"""

from __future__ import annotations

from collections.abc import Container, Iterable


class Boundaries:
    """A calendar of steps. A step is one call of `due`.

    Args:
        tokens_per_step: new tokens that one request may get in one step, at most (more than one with speculative decoding).
    """

    def __init__(self, tokens_per_step: int) -> None:
        self._tokens_per_step = max(1, tokens_per_step)
        self._step = 0
        self._when: dict[str, int] = {}  # those that are not due, and their step
        self._calendar: dict[int, list[str]] = {}  # may name requests that were moved or forgotten since
        self._due: dict[str, None] = {}  # ordered set

    def __len__(self) -> int:
        return len(self._when) + len(self._due)

    def start(self, request_ids: Iterable[str]) -> None:
        """Nothing is known of these (they begin, resume, or names have changed): look when they are next scheduled."""
        for request_id in request_ids:
            self._when.pop(request_id, None)
            self._due[request_id] = None

    def due(self, scheduled: Container[str]) -> list[str]:
        """Begin the next step: which of the requests scheduled in it to look at. They stay due until `later` or `forget`."""
        self._step += 1
        for request_id in self._calendar.pop(self._step, ()):
            if self._when.get(request_id) == self._step:
                del self._when[request_id]
                self._due[request_id] = None
        return [request_id for request_id in self._due if request_id in scheduled]

    def later(self, request_id: str, num_tokens: int) -> None:
        """Look again when so many tokens more can be known, counted from those that are known or computed by now.

        0 or less: in the next step.
        """
        step = self._step + max(1, -(-num_tokens // self._tokens_per_step))
        self._due.pop(request_id, None)
        self._when[request_id] = step
        self._calendar.setdefault(step, []).append(request_id)

    def forget(self, request_id: str) -> None:
        """The request is finished."""
        self._when.pop(request_id, None)
        self._due.pop(request_id, None)
