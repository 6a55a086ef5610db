"""The L2 tier: a Mooncake store behind a state machine that never blocks, never raises and never returns foreign bytes."""

from epochkv_connector.store.client import StoreClient
from epochkv_connector.store.lanes import Outcome, StoreUnavailable, Ticket, Transfer
from epochkv_connector.store.link import State
from epochkv_connector.store.settings import ENVIRONMENT, StoreSettings, prepare_environment

__all__ = [
    "ENVIRONMENT",
    "Outcome",
    "State",
    "StoreClient",
    "StoreSettings",
    "StoreUnavailable",
    "Ticket",
    "Transfer",
    "prepare_environment",
]
