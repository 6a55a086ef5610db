"""Puts our log lines among vLLM's. Knows of vLLM: the logger `vllm` and its handlers."""

from __future__ import annotations

import copy
import logging

PREFIX = "EpochKV"


class _Ours(logging.Handler):
    """Hands records to vLLM's handlers, with our name in front: vLLM's lines show only a file's name."""

    def emit(self, record: logging.LogRecord) -> None:
        """As `logging.Handler.emit`."""
        if not str(record.msg).startswith(PREFIX):
            record = copy.copy(record)
            record.msg = f"{PREFIX}: {record.msg}"
        for handler in logging.getLogger("vllm").handlers:
            if record.levelno >= handler.level:
                handler.handle(record)


def share_log_handlers() -> None:
    """Let our packages log as vLLM does (time, level, module, process). Without handlers INFO lines would be lost.

    Does nothing where the user has set up logging for our packages.
    """
    handlers = logging.getLogger("vllm").handlers
    for name in ("epochkv_connector", "epochkv_fence"):
        logger = logging.getLogger(name)
        if not logger.handlers and logger.level == logging.NOTSET and handlers:
            logger.handlers = [_Ours()]
            logger.setLevel(logging.INFO)
