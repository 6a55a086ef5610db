"""The network: loses, duplicates, reorders and holds back, by any amount; what arrives is what was sent, as frames."""

from __future__ import annotations

from typing import TYPE_CHECKING

from epochkv_fence.protocol.messages import Bump, Message, Propose, decode, encode
from tests.model.parts import MAX_IN_FLIGHT, Packet

if TYPE_CHECKING:
    from tests.model.world import World


class Network:
    """Packets in flight."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.packets: list[Packet] = []

    def post(self, sender: str, receiver: str, message: Message) -> None:
        """Send a message."""
        world = self.world
        self.packets.append(Packet(sender, receiver, message, encode(message), world.late()))
        if len(self.packets) > MAX_IN_FLIGHT:
            world.count("lost")
            self.packets.pop(world.rng.randrange(len(self.packets)))

    def asks(self, target: int) -> bool:
        """Whether somebody's wish for an epoch above this one is on its way."""
        return any(isinstance(packet.message, Bump | Propose) and packet.message.epoch > target for packet in self.packets)

    def deliver(self) -> bool:
        """One packet arrives, twice, or never; False: none is there that could."""
        world, rng = self.world, self.world.rng
        now = world.now
        shut = self._shut()
        ready = [index for index, packet in enumerate(self.packets) if packet.not_before <= now and packet.receiver not in shut]
        if not ready:
            return False
        index = rng.choice(ready) if rng.random() < world.profile.disorder else ready[0]
        packet = self.packets[index]
        fate = rng.random()
        if fate < 0.05:
            world.count("lost")
            self.packets.pop(index)
        else:
            if fate < 0.15:
                world.count("duplicated")
            else:
                self.packets.pop(index)
            self._arrive(packet)
        return True

    def _shut(self) -> set[str]:
        """Who takes no messages now: frozen, or busy with what the last one set off."""
        world, now = self.world, self.world.now
        engines = {f"e{engine.index}" for engine in world.engines if now < engine.frozen_until or engine.queue}
        return engines | {f"h{process.index}" for process in world.hubs if not world.hub_side.free(process)}

    def hand_over(self, packet: Packet) -> bool:
        """Give a packet to its receiver; False: it is frozen or busy."""
        if packet.receiver in self._shut():
            return False
        self._arrive(packet)
        return True

    def _arrive(self, packet: Packet) -> None:
        world = self.world
        who, index = packet.receiver[0], int(packet.receiver[1:])
        if who == "h":
            world.hub_side.hear(world.hubs[index], packet.sender.encode(), decode(packet.frames))
        elif who == "e":
            world.engine_side.receive(world.engines[index], decode(packet.frames))
        elif index == world.trainer.incarnation:
            world.trainer.receive(decode(packet.frames))
