"""Every exit of vLLM's loop over waiting requests, read from its source, and which of them a step took."""

import ast
import functools
import inspect
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

EXITS = {
    "no queue or no room for drafts": "not request_queue or input_budget <= draft_slots",
    "too many requests": "num_running >= self.max_num_active_reqs",
    "blocked": "not ready_to_schedule",
    "stale output": "request.num_stale_output_tokens and (not request.drop_stale_output)",
    "too many adapters": (
        "self.lora_config and request.lora_request and (len(scheduled_loras) == self.lora_config.max_loras "
        "and request.lora_request.lora_int_id not in scheduled_loras)"
    ),
    "asked again later": "ext_tokens is None",
    "encoder outputs on their way": "self._ec_transfer_pending(request, num_computed_tokens)",
    "prefill deferred": "defer_prefills and num_computed_tokens < request.num_tokens - 1",
    "no room for padding": "padded_num_tokens > request_token_budget",
    "prompt too long for one step": (
        "not self.scheduler_config.enable_chunked_prefill and num_new_tokens > request_token_budget and (not self.is_mm_encoder_only)"
    ),
    "no tokens left": "num_new_tokens == 0",
    "no blocks": "new_blocks is None",
    "load begun": "load_kv_async",
}


def waiting_loop() -> ast.While:
    """vLLM's loop over waiting requests; line numbers are those of its file."""
    lines, first = inspect.getsourcelines(Scheduler.schedule)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    ast.increment_lineno(tree, first - 1)
    (loop,) = [node for node in ast.walk(tree) if isinstance(node, ast.While) and ast.unparse(node.test) == "token_budget > 0"]
    return loop


@functools.cache
def exits() -> dict[int, str]:
    """Line of each `break` and `continue` of the loop -> the innermost condition it stands under."""
    found: dict[int, str] = {}

    def visit(statements: list[ast.stmt], condition: str) -> None:
        for statement in statements:
            if isinstance(statement, ast.Break | ast.Continue):
                found[statement.lineno] = condition
            elif isinstance(statement, ast.If):
                visit(statement.body, ast.unparse(statement.test))
                visit(statement.orelse, f"not ({ast.unparse(statement.test)})")

    visit(waiting_loop().body, "")
    return found


@contextmanager
def traced() -> Iterator[set[str]]:
    """The exits that `Scheduler.schedule` took inside the block."""
    lines, taken = exits(), set[str]()
    names = {condition: name for name, condition in EXITS.items()}

    def local(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and frame.f_lineno in lines:
            taken.add(names.get(lines[frame.f_lineno], lines[frame.f_lineno]))
        return local

    before = sys.gettrace()
    sys.settrace(lambda frame, event, argument: local if frame.f_code is Scheduler.schedule.__code__ else None)
    try:
        yield taken
    finally:
        sys.settrace(before)
