"""A router that hears an engine's KV events over vLLM's own ZeroMQ publisher, in order with vLLM's events of GPU blocks."""

import time
from typing import Any

import zmq


class Router:
    """A subscriber that believes what it hears: which blocks are where. It takes offence at what a router could not follow.

    Attributes:
        where: (medium, group, hash) of every block announced and not taken back.
        heard: all events, in order.
        payloads: the messages they came in.
    """

    def __init__(self, publisher: Any) -> None:
        self.payloads: list[bytes] = []
        self.where: set[tuple[str, int, int]] = set()
        self.tokens: dict[int, tuple[tuple[int, ...], int | None]] = {}
        self.heard: list[Any] = []
        self._publisher = publisher
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._sequence = -1

    def connect(self, endpoint: str) -> None:
        """Return once a published batch arrives: a subscription takes effect late."""
        self._socket.connect(endpoint)
        deadline = time.monotonic() + 20.0
        while self._socket.poll(50) == 0:
            assert time.monotonic() < deadline, "the subscription does not take effect"
            self._publish([])
        self._sequence = self._receive()[0]

    def _publish(self, events: list[Any]) -> None:
        from vllm.distributed.kv_events import KVEventBatch

        self._publisher.publish(KVEventBatch(ts=time.time(), events=events))

    def _receive(self) -> tuple[int, list[Any]]:
        import msgspec
        from vllm.distributed.kv_events import KVEventBatch

        _, sequence, payload = self._socket.recv_multipart()
        self.payloads.append(payload)
        return int.from_bytes(sequence, "big"), msgspec.msgpack.Decoder(KVEventBatch).decode(payload).events

    def listen(self) -> list[Any]:
        """Everything published up to now, exactly once and in order."""
        from vllm.distributed.kv_events import BlockRemoved

        mark = BlockRemoved(block_hashes=[7], medium="MARK")
        self._publish([mark])
        news: list[Any] = []
        while True:
            assert self._socket.poll(10_000), "the publisher is silent"
            sequence, events = self._receive()
            assert sequence == self._sequence + 1, "an event was lost"
            self._sequence = sequence
            if events == [mark]:
                break
            news += events
        for event in news:
            self._believe(event)
        self.heard += news
        return news

    def _believe(self, event: Any) -> None:
        kind = type(event).__name__
        if kind == "AllBlocksCleared":
            self.where.clear()
            return
        if kind == "BlockStored" and event.kv_cache_spec_kind == "full_attention" and event.parent_block_hash is not None:
            assert self.knows(event.group_idx, event.parent_block_hash), f"a child before its parent: {event}"
        for name in event.block_hashes:
            place = (event.medium, event.group_idx, name)
            if kind == "BlockRemoved":
                assert place in self.where, f"removed, and never stored: {place}"
                self.where.discard(place)
            else:
                self.where.add(place)
        if kind == "BlockStored" and event.medium == "CPU":
            assert len(event.block_hashes) == 1
            self.tokens[event.block_hashes[0]] = (tuple(event.token_ids), event.parent_block_hash)

    def knows(self, group: int, name: int) -> bool:
        """Whether it was told of a block since the last clearing."""
        return any((medium, group, name) in self.where for medium in ("GPU", "CPU"))

    def blocks(self, medium: str, group: int = 0) -> set[int]:
        """What it believes to be there."""
        return {name for where, of_group, name in self.where if (where, of_group) == (medium, group)}

    def close(self) -> None:
        self._socket.close(0)


def findable(rig: Any, group: int = 0) -> set[int]:
    """Names that L1 holds and can be asked for under the present root, as its index says."""
    index = rig.tiers.state.index
    names = [name for name in index._names if name is not None]
    current = {name for of_group, name in names if of_group == group and index._roots[index._maps[group][name]] == index._root}
    return {int.from_bytes(name, "big") % (1 << 64) for name in current}  # vLLM publishes the last 64 bits
