"""What lookups and plans are tested with: the tiers that there are, a prompt, and what another engine has stored."""

from __future__ import annotations

from epochkv_connector.tiers.layout import CacheLayout
from tests.unit.connector_scheduler.rig import FULL, HASH_BLOCK, World, chain, config, snap_of, view

SNAP = snap_of(1)
PROMPT = list(range(41))  # 10 full hash blocks and one token more
L1 = config(l1_slots=200)
L2 = config(l2=True)
BOTH = config(l1_slots=200, l2=True)


def stored(world: World, tokens: list[int], layout: CacheLayout = FULL) -> None:
    """Another engine has put this prompt to L2."""
    assert SNAP.namespace
    hashes = chain(SNAP.root, tokens)
    for group, spec in enumerate(layout.groups):
        scale = spec.block_size // HASH_BLOCK
        for block in range(len(hashes) // scale):
            world.store.put(SNAP.namespace, group, hashes[(block + 1) * scale - 1])


def planned(cfg=BOTH, layout: CacheLayout = FULL, l1_tokens: int = 20) -> World:
    """A world in which request b has a plan of 40 tokens: some in L1, the rest in L2."""
    world = World(cfg, layout)
    if cfg.local:
        world.free(world.save("a", PROMPT[:l1_tokens], SNAP))
        world.tiers.finish("a")
    stored(world, PROMPT, layout)
    assert world.tiers.hits.answer(view("b", PROMPT, SNAP.root), 0, SNAP).num_tokens == 40
    return world


def commit(world: World, num: int, snap=SNAP, blocks=None) -> bool | None:
    blocks = world.allocate(0, max(num, 0)) if blocks is None else blocks
    return world.commit(view("b", PROMPT, SNAP.root), blocks, num, snap)
