"""vLLM's sleep unmaps the memory of weights and KV: nothing of ours may touch it then (`sleeping.py`, in a process of its own)."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

TIMES = 24
"""With vLLM's hooks and without, in place and elsewhere, two levels, three orders of tags."""


def sleep(folder: Path, fault: str) -> tuple[int, int, str]:
    """(exit status, how often it has slept, what it said)."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.scheduler.sleeping", str(folder), fault], capture_output=True, text=True, timeout=300, check=False
    )
    return ended.returncode, ended.stdout.count("slept"), ended.stderr[-3000:]


def test_no_copy_and_no_digest_touches_unmapped_memory(tmp_path: Path) -> None:
    status, slept, said = sleep(tmp_path, "")
    assert (status, slept) == (0, TIMES), said


@pytest.mark.parametrize("fault", ["no drain", "looks"])
def test_without_our_rules_the_engine_dies(tmp_path: Path, fault: str) -> None:
    status, slept, said = sleep(tmp_path, fault)
    assert status == -signal.SIGSEGV, said
    assert slept < TIMES


def test_a_sleep_that_comes_past_the_executor_is_safe_from_vllm_0_33_on(tmp_path: Path) -> None:
    status, slept, said = sleep(tmp_path, "hooks alone")
    assert (status, slept) == (0, TIMES // 2), said
