"""Structured logs: one line per transition, JSON in a cluster, coloured text on a terminal. Libraries' records take the same way."""

import logging
import sys
from typing import Any

import structlog

from epochkv_fence.common import LogThread
from epochkv_operator.settings import LogFormat

#: kopf says on every object and every event what it does; only its warnings say something new.
_QUIET = {
    "kopf": logging.WARNING,
    "kopf.objects": logging.WARNING,
    "aiohttp.access": logging.WARNING,
    # How it ends when it is told to.
    "kopf._core.reactor.running": logging.ERROR,
    # Every attempt of every watch while the API server is away; kopf raises when it gives up.
    "kopf._cogs.clients": logging.CRITICAL,
    "asyncio": logging.WARNING,
}


def configure(log_format: LogFormat, level: str) -> None:
    """Route structlog and the standard library's logging to stdout in one format."""
    shared: list[Any] = [
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderer: Any
    if log_format == "json":
        shared.append(structlog.processors.format_exc_info)
        renderer = structlog.processors.JSONRenderer(sort_keys=True)
    else:
        # The default shows local variables beside a traceback, and those may be keys.
        renderer = structlog.dev.ConsoleRenderer(colors=sys.stdout.isatty(), exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, *shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer]
    )
    root = logging.getLogger()
    root.handlers = [LogThread(1, formatter)]  # the hub's thread logs, too
    root.setLevel(level.upper())
    for name, quiet_level in _QUIET.items():
        logging.getLogger(name).setLevel(max(quiet_level, root.level))
