"""`epochkv hub`: serve a pool without Kubernetes, until a signal ends it."""

import asyncio
import json
import logging
import os
import shlex
import signal
import threading
import time
from pathlib import Path
from typing import Annotated, Final, Literal

import typer

from epochkv_fence.cli.render import Exit, say_error
from epochkv_fence.common import LogThread
from epochkv_fence.launch import transfer_config
from epochkv_fence.protocol.pool import ReclaimPolicy
from epochkv_fence.standalone.credentials import CLIENT_FOLDER, retire_previous, rotate_keys
from epochkv_fence.standalone.hub import HubOptions, StandaloneHub

END_SECONDS: Final = 10.0
"""Longer than an orderly end takes: each of its steps has a shorter deadline."""


LogFormat = Literal["text", "json"]
ReclaimOption = Annotated[
    ReclaimPolicy,
    typer.Option(
        help="Delete: an engine removes old keys. RemoveAll: the hub also empties the store after each reset. "
        "Retain: the store evicts them."
    ),
]


class _JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        fields = getattr(record, "fields", {})
        content = {"timestamp": stamp, "level": record.levelname.lower(), "logger": record.name, "event": record.getMessage(), **fields}
        if record.exc_info:
            content["exception"] = self.formatException(record.exc_info)
        return json.dumps(content, default=str)


def configure_logs(log_format: LogFormat) -> None:
    """Everything to stderr, one line per transition. Lines that nobody reads are lost."""
    text = logging.Formatter("%(asctime)s.%(msecs)03d %(levelname)-7s %(message)s", "%H:%M:%S")
    root = logging.getLogger()
    root.handlers = [LogThread(2, _JsonFormatter() if log_format == "json" else text)]
    root.setLevel(logging.INFO)
    logging.getLogger("asyncio").setLevel(logging.WARNING)


def hub(
    pool: Annotated[
        str, typer.Option("--pool", metavar="NAME", help="Name of the pool: lower-case letters, digits, - and ., as in Kubernetes.")
    ],
    listen: Annotated[str, typer.Option(metavar="tcp://HOST:PORT", help="Where to listen; * for every address, port 0 for a free one.")],
    state: Annotated[Path, typer.Option(metavar="DIR", help="Directory of the record and the keys; the hub creates it on first use.")],
    lease_seconds: Annotated[
        float,
        typer.Option(
            min=0.5, max=86_400, help="How long an engine may use an epoch without hearing from the hub. A restart cannot make it shorter."
        ),
    ] = 30.0,
    reclaim: ReclaimOption = "Delete",
    store_admin: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="Admin port of the Mooncake master, for a store that only this pool uses; repeatable."),
    ] = None,
    advertise: Annotated[str, typer.Option(metavar="tcp://HOST:PORT", help="Address that clients dial. Default: from --listen.")] = "",
    metrics: Annotated[str, typer.Option(metavar="HOST:PORT", help="Serve /metrics and /healthz there. Default: no.")] = "",
    log_format: Annotated[LogFormat, typer.Option(help="text for people, json for collectors.")] = "text",
) -> None:
    """Serve a pool without Kubernetes. One process; its record and keys are in --state.

    A hub that starts again with the same state continues the pool, and engines keep their leases. Keep the state on a disk that
    survives, and never restore an older copy of it. Keep STATE/client private: it holds the pool's keys.

    \b
      epochkv hub --pool policy --listen 'tcp://*:7700' --state /var/lib/epochkv/policy
      epochkv hub --pool policy --listen tcp://0.0.0.0:7700 --state DIR --advertise tcp://head-node:7700

    Engines and trainers join with `EPOCHKV_CONFIG=STATE/client/connection.json`, on other machines with a copy of that folder.

    Exit status: 0 ended by SIGTERM or SIGINT; 1 ended by a signal, but shutdown took more than 10 s, or the disk is full or did not
    answer at the start; 2 wrong usage, or the address is taken; 5 the state cannot be used (held by another process, unreadable, of
    another pool); 6 the state was removed or replaced while the hub served.
    """
    state = Path(os.path.expanduser(state))  # no shell does it in --state=~/policy
    made = StandaloneHub(HubOptions(pool, listen, state, lease_seconds, reclaim, tuple(store_admin or ()), advertise, metrics))
    configure_logs(log_format)
    raise typer.Exit(asyncio.run(serve(made, log_format)))


async def serve(made: StandaloneHub, log_format: LogFormat) -> Exit:
    """Until SIGTERM, SIGINT, or the loss of the state."""
    logger = logging.getLogger("epochkv.hub")
    loop, serving = asyncio.get_running_loop(), asyncio.current_task()
    assert serving is not None
    signalled = False

    def end() -> None:
        nonlocal signalled
        if not signalled:
            signalled = True
            _end_anyway()
            serving.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    try:
        await made.start()
        text = f"pool {made.options.pool} ({made.uid}) on {made.endpoint}, state {made.options.state.absolute()}"
        fields = {"pool": made.options.pool, "uid": made.uid, "endpoint": made.endpoint, "connection": str(made.connection_file)}
        logger.info(text, extra={"fields": fields})
        if log_format == "text":
            print(introduction(made), flush=True)
        await made.lost.wait()
    except asyncio.CancelledError:
        if not signalled:
            raise
        served = "engines keep what they were granted until their leases expire"
        logger.info("ended by a signal%s", f": {served}" if made.connection_file.name else " before it served")
        return Exit.DONE
    finally:
        await made.stop()
    say_error(f"{made.options.state} was removed or replaced under this hub; it cannot prove any more that it leads")
    return Exit.LOST


def _end_anyway() -> None:
    """Be gone END_SECONDS from now, also when a thread of this process hangs on a disk that does not answer."""

    def give_up() -> None:
        say_error(f"shutdown took more than {END_SECONDS:g} s: something stalls, perhaps a disk; giving up")
        os._exit(Exit.FAILED)

    timer = threading.Timer(END_SECONDS, give_up)
    timer.daemon = True
    timer.start()


def introduction(made: StandaloneHub) -> str:
    """How to join, for the person who started the hub in a terminal."""
    folder = made.connection_file.parent
    transfer = json.dumps(transfer_config({"local": {"capacity_bytes": 8 << 30}}))
    return "\n".join(
        [
            f"Engines and trainers of pool {made.options.pool} join with",
            f"  export EPOCHKV_CONFIG={shlex.quote(str(made.connection_file))}",
            f"  vllm serve MODEL --shutdown-timeout 20 --kv-transfer-config '{transfer}'",
            f"On other machines copy {folder} (it holds keys: keep it private). Then",
            "  epochkv status",
            "  epochkv weights      # which engines hold which weights",
            "  epochkv reset        # forget everything",
        ]
    )


# ----------------------------------------------------------------------------------------------------------------------
# `epochkv keys rotate|retire`: replace the key that speaks for a pool, without an engine losing its lease.


KEYS_HELP: Final = "Replace the key that speaks for a pool, without an engine losing its lease."

keys = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)

State = Annotated[Path, typer.Option("--state", metavar="DIR", help="The hub's state directory.")]


@keys.command("rotate")
def rotate(
    state: State,
    grace: Annotated[
        float, typer.Option(min=0, max=365 * 86_400, metavar="SECONDS", help="How long the hub accepts the old key.")
    ] = 86_400.0,
) -> None:
    """Make a new client key. The running hub accepts it within a second, and the one before as well.

    Engines and trainers on this machine read the new key from STATE/client by themselves; elsewhere replace their copy of that
    folder. The hub accepts the old key until --grace is over, or `epochkv keys retire`. A client that has its key in its environment
    needs the new key by then.

    \b
      epochkv keys rotate --state /var/lib/epochkv/policy
      epochkv keys rotate --state DIR --grace 0 && epochkv keys retire --state DIR   # it leaked: out with it now
    """
    rotate_keys(state := Path(os.path.expanduser(state)), grace)
    before = f"is accepted for {grace:.0f} s" if grace else "is not accepted any more: a running hub notices within a second"
    print(f"new client key in {state / CLIENT_FOLDER}; the one before {before}")


@keys.command("retire")
def retire(state: State) -> None:
    """Accept only the newest client key. The hub rejects the old one, and engines that still have it serve in bypass.

    \b
      epochkv keys retire --state /var/lib/epochkv/policy
    """
    retire_previous(Path(os.path.expanduser(state)))
    print("only the newest client key is accepted; a running hub notices within a second")
