"""The command line as tests run it without the start of another process."""

import sys

import pytest

from epochkv_fence.cli.__main__ import main


def inside(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """`epochkv ARGUMENTS` in this process: exit status, what it wrote to stdout, and to stderr."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["epochkv", *arguments])
        patch.delenv("EPOCHKV_CONFIG", raising=False)
        with pytest.raises(SystemExit) as ended:
            main()
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err
