"""The L2 tier: a Mooncake store behind a state machine that never blocks, never raises and never returns foreign bytes."""

from epochkv_connector.store.client import StoreClient
from epochkv_connector.store.connection import StoreState
from epochkv_connector.store.queues import StoreOutcome, StoreUnavailable, Ticket, Transfer
from epochkv_connector.store.settings import ENVIRONMENT, StoreSettings, prepare_environment

__all__ = [
    "ENVIRONMENT",
    "StoreClient",
    "StoreOutcome",
    "StoreSettings",
    "StoreState",
    "StoreUnavailable",
    "Ticket",
    "Transfer",
    "prepare_environment",
]
