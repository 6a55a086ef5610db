"""The row that needs vLLM: what the fence costs on the scheduler thread."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from bench.fence.parts import ROOT, Child
from bench.report import Figure, Progress, Row

SECONDS = 300.0


def engine_python() -> str:
    """The interpreter of the engine environment; `EPOCHKV_PYTHON_ENGINE`, or where `make setup-engine` puts it."""
    given = Path(os.environ.get("EPOCHKV_PYTHON_ENGINE") or ROOT / ".build/venv-engine/bin/python")
    if not given.exists():
        raise FileNotFoundError(f"{given}: no engine environment; run `make setup-engine`")
    return str(given)


def cost(progress: Progress) -> Row:
    """Microseconds for each request admitted, and for each step."""
    with Child("bench.fence.scheduler_process", {}, engine_python(), VLLM_LOGGING_LEVEL="ERROR") as child:
        child.process.poll()
        figures = child.hear(SECONDS)
    print(f"    {figures}", file=sys.stderr, flush=True)
    return Row(
        "agent cost on the scheduler thread",
        [
            Figure("per request admitted", figures["request"], 10.0, "us"),
            Figure("per step, for each running request", max(0.0, figures["step_256"] - figures["step"]) / 256, 0.01, "us"),
            Figure("per step, whatever runs", figures["step"], None, "us"),
        ],
        figures,
    )
