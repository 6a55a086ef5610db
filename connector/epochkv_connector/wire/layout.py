"""What each rank says of its KV and its host memory when the engine starts.

vLLM shows the scheduler role no true sizes: of layers with unlike pages it sees the first, of pipeline stages the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RankLayout:
    """One rank, as measured on the KV tensors that vLLM registered.

    Attributes:
        digest: of how they lie (`worker.layout.layout_digest`); empty: nobody has looked.
        num_slots: of its host region; 0: it has none, and answers every job as failed.
        payload_bytes: of one block, by KV cache group: of those that are saved.
        refusal: why there are no slots; empty: there are, or nobody knows why.
    """

    digest: bytes = b""
    num_slots: int = 0
    payload_bytes: Mapping[int, int] = field(default_factory=dict)
    refusal: str = ""

    @property
    def why_no_slots(self) -> str:
        """Empty: it has some."""
        return "" if self.num_slots else self.refusal or "it has no host memory for them"


def common_slots(layouts: Sequence[RankLayout], num_ranks: int) -> int:
    """Slots that every one of `num_ranks` ranks has: a job names the same slots on all of them. 0 unless all have answered."""
    return min(layout.num_slots for layout in layouts) if len(layouts) == num_ranks > 0 else 0
