"""Everything that a hub knows about one pool. Each part owns its own facts and knows no other part.

What an event does to several parts is in `hearing`, `resets`, `removal` and `machine`.
"""

from __future__ import annotations

from epochkv_fence.hub.boots import Boots
from epochkv_fence.hub.reclaim import Reclaimer, Reported, Wiper
from epochkv_fence.hub.record import Labels, Leadership, Record
from epochkv_fence.hub.rounds import Rounds, Waiters
from epochkv_fence.hub.rules import HubRules
from epochkv_fence.protocol.pool import PoolConfig


class HubState:
    """One pool, as the hub in this process knows it; `rules` decide what the hub may do."""

    def __init__(self, config: PoolConfig, rules: HubRules) -> None:
        self.config = config
        self.rules = rules
        self.lead = Leadership()
        self.record = Record()
        self.boots = Boots()
        self.rounds = Rounds()
        self.waiters = Waiters()
        self.labels = Labels()
        self.wiper = Wiper()
        self.reclaimer = Reclaimer()
        self.reported = Reported()

    @property
    def leading(self) -> bool:
        """This hub leads, and has read the record."""
        return self.lead.term is not None

    @property
    def open(self) -> bool:
        """A reset is under way."""
        return self.leading and (self.record.target > self.record.published or self.record.recording is not None)
