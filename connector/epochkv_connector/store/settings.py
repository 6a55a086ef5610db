"""What the store client is told, and the environment that Mooncake reads.

Several of Mooncake's limits exist only as environment variables, and their defaults turn a lost packet into minutes:
they are set here before the library is imported, and an engine whose operator did not set them is told so once.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from dataclasses import dataclass

from epochkv_connector.config.connector_config import ConnectorConfig

ENVIRONMENT = {
    "MC_RPC_TIMEOUT_MS": "1000",  # a hung master costs 1 s, not 30
    "MC_RPC_CONNECT_TIMEOUT_MS": "500",  # a master behind a dead address costs 4 s, not 120
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",  # setup holds the GIL while it tries
    "MC_TCP_STATUS_TIMEOUT_SEC": "5",  # a hung segment owner; `status_timeout` of a load's default deadline
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "5",  # a peer that stalls in mid-payload
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",  # overflow poisons the client
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
    "MC_TCP_ADMISSION_TIMEOUT_MS": "30000",
    "MC_MIN_RPC_PORT": "15000",  # pins both listeners of a client, so that a NetworkPolicy can name them
    "MC_MAX_RPC_PORT": "15063",
    "MC_YLT_LOG_LEVEL": "warn",
}
"""Variable -> value, measured as a whole block on the pinned Mooncake version."""

LOAD_SECONDS = 10.0
"""A load's default deadline (`job_deadline_seconds`)."""
_STATUS = "MC_TCP_STATUS_TIMEOUT_SEC"
_STATUS_SECONDS = (2, 10)
"""Shorter takes a machine that stands still for a store that is gone (measured: 18 of 28 gets failed in a stall of 2.5 s with a
limit of 2 s, none with 5 s); longer keeps the buffers of a call to a hung store for minutes."""


def status_timeout(load_seconds: float) -> int:
    """Whole seconds after which Mooncake gives up a store that says nothing.

    Half of a load's deadline: a stall of that length is waited out, and a store that is gone is known before the load has
    failed by itself.
    """
    low, high = _STATUS_SECONDS
    return max(low, min(high, int(load_seconds / 2)))


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """How to reach the store and how patient to be.

    Attributes:
        master_address: `host:port`, or `etcd://h1:2379;h2:2379` for a replicated master.
        metadata_server, protocol, device_name: Mooncake's `setup` arguments of these names.
        local_hostname: address of this process for its peers; None: `POD_IP`, else the address the master is reached from.
        verify_payload: checksum of the whole payload on put and get, not only header and trailer.
        get_threads: store calls that may fetch at the same time (a call to a hung peer blocks for seconds).
        min_call_keys, max_call_keys, max_call_bytes: one store call carries as many objects at first and after a call that
            failed or was slow, and never more than this. A call to a hung peer blocks for a status timeout and more (measured with 2 s: 4
            keys 2.0 s, 8 keys 4-6 s, 16 keys 12 s, 32 keys 23 s), and buffers are out of use until it returns.
        fast_call_seconds: a call that took no longer allows the next one of its kind to carry twice as many objects.
        max_queued_puts: objects that wait to be put; beyond it the oldest waiting put is dropped.
        max_exists_keys: one existence query never asks for more.
        hung_call_seconds, quarantine_seconds: Mooncake's own batch limit, and not its socket, has ended a failed transfer call that
            lasted at least the former. Its buffers stay out of use for the latter (Mooncake's progress timeout is 5 s).
        load_seconds: deadline of a load, from which Mooncake's own limit for a silent store follows (`status_timeout`).
        probe_timeout_seconds, min_backoff_seconds, max_backoff_seconds: reaching the master while it is away.
        setup_backoff_seconds: first and longest pause after a `setup` that failed, or whose client did not work. It holds the GIL for
            about a second, in which the engine stands still, and so does every repetition (measured with a master slower than
            an RPC's limit: 1.1 s in every 6 s, for each client).
        poison_seconds, poison_calls: the client starts over after so many calls in a row that failed as transfers, over at least this
            time. It is longer than the master's `client_ttl`, within which a dead segment owner looks the same.
    """

    master_address: str
    metadata_server: str = "P2PHANDSHAKE"
    protocol: str = "tcp"
    device_name: str = ""
    local_hostname: str | None = None
    verify_payload: bool = True
    get_threads: int = 2
    min_call_keys: int = 4
    max_call_keys: int = 16
    max_call_bytes: int = 32 << 20
    fast_call_seconds: float = 0.25
    max_queued_puts: int = 4096
    max_exists_keys: int = 1024
    hung_call_seconds: float = 25.0
    quarantine_seconds: float = 8.0
    load_seconds: float = LOAD_SECONDS
    probe_timeout_seconds: float = 0.5
    min_backoff_seconds: float = 0.1
    max_backoff_seconds: float = 5.0
    setup_backoff_seconds: tuple[float, float] = (2.0, 120.0)
    poison_seconds: float = 20.0
    poison_calls: int = 4

    @classmethod
    def of(cls, config: ConnectorConfig) -> StoreSettings | None:
        """The L2 tier of a connector configuration; None: it has none."""
        tier = config.distributed
        if tier is None:
            return None
        return cls(
            master_address=tier.master_address,
            metadata_server=tier.metadata_server,
            protocol=tier.protocol,
            device_name=tier.device_name,
            verify_payload=config.verify == "full",
            load_seconds=config.job_deadline_seconds,
        )


def prepare_environment(environ: MutableMapping[str, str] | None = None, load_seconds: float = LOAD_SECONDS) -> list[str]:
    """Set what the operator did not set; must run before Mooncake is imported.

    Args:
        environ: default: this process's.
        load_seconds: see `StoreSettings`.

    Returns:
        The variables that were missing, which are logged once by the caller.
    """
    target = os.environ if environ is None else environ
    missing = [name for name in ENVIRONMENT if name not in target]
    for name in missing:
        target[name] = str(status_timeout(load_seconds)) if name == _STATUS else ENVIRONMENT[name]
    target.setdefault("GLOG_minloglevel", "1")  # otherwise every setup writes a page of INFO lines to stderr
    return missing
