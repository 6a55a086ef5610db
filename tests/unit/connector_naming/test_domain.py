"""Ranks of a domain in threads, with all-reduces in lockstep: when they carry more, what each then knows, and when a pass is settled."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore

from epochkv_connector.weights.digest import is_of_experts
from epochkv_connector.weights.domain import SETTLED, TOLD_BYTES, UNKNOWN, Column, Domain, Peers, domain_digest
from hack.waiting import eventually

ROWS = 4
PLAIN = (ROWS,)
NO_CHANGES = bytes(4)


def told(rank: int, weights: int = 1) -> Column:
    return bytes([rank + 1, weights]) * (TOLD_BYTES // 2) + NO_CHANGES


class Group:
    """An all-reduce of `size` ranks, which all have to bring tensors of one shape. `without`: ranks that have no `Domain`."""

    def __init__(self, size: int, without: tuple[int, ...] = (), late: tuple[int, ...] = ()) -> None:
        self.size = size
        self.claims = [told(rank) for rank in range(size)]
        self.rows: list[int] = []
        self.domains: dict[int, Domain] = {}
        self._store, self._late = HashStore(), late
        self._brought: list[torch.Tensor] = []
        self._lock = threading.Lock()
        self._all = threading.Barrier(size)
        self._without = without
        for rank in range(size):
            if rank not in (*without, *late):
                self.join(rank)

    def join(self, rank: int) -> None:
        self.domains[rank] = Domain(self.size, rank, self._store, "0", lambda: self.claims[rank], lambda: None)

    def step(self) -> None:
        """One pass of all ranks. Those that are late join while the others wait in it."""
        with ThreadPoolExecutor(self.size) as pool:
            for done in [pool.submit(self._pass, rank) for rank in range(self.size)]:
                done.result(10)

    def _pass(self, rank: int) -> None:
        if rank in self._late and rank not in self.domains:
            while len(self._brought) < self.size - len(self._late):
                threading.Event().wait(0.001)
            self.join(rank)
        tensor = torch.zeros((ROWS, self.size), dtype=torch.int32)
        tensor[:, rank] = torch.tensor([rank, 7, 0, rank + 1], dtype=torch.int32)
        if rank in self.domains:
            self.domains[rank].carry(tensor, self._reduce)
        else:
            self._reduce(tensor)
        assert tensor.tolist() == [list(range(self.size)), [7] * self.size, [0] * self.size, list(range(1, self.size + 1))], "vLLM's own"

    def _reduce(self, tensor: torch.Tensor) -> None:
        with self._lock:
            self._brought.append(tensor.clone())
        if self._all.wait(10) == 0:
            shapes = {tuple(one.shape) for one in self._brought}
            assert len(shapes) == 1, f"ranks are out of step: {shapes}"
            self.rows.append(len(self._brought[0]))
            self._sum = torch.stack(self._brought).sum(0).to(torch.int32)
            self._brought = []
        self._all.wait(10)
        tensor.copy_(self._sum)
        self._all.wait(10)


@pytest.mark.parametrize("late", [(), (0,), (1,), (1, 2)])
def test_from_one_all_reduce_on_every_rank_sees_what_all_claim(late: tuple[int, ...]) -> None:
    group = Group(3, late=late)
    for _ in range(5):
        group.step()
    first = next(number for number, rows in enumerate(group.rows) if rows > ROWS)
    assert first <= 2
    assert set(group.rows[first:]) == {ROWS + 5}
    assert {domain.columns for domain in group.domains.values()} == {tuple(group.claims)}
    group.claims[1] = told(1, 2)
    group.step()
    assert {domain.columns for domain in group.domains.values()} == {(told(0), told(1, 2), told(2))}
    assert all(not domain.alone for domain in group.domains.values())


@pytest.mark.parametrize("without", [(0,), (1,), (1, 2)])
def test_where_a_rank_lacks_us_nobody_carries_more_and_all_others_name_it(without: tuple[int, ...]) -> None:
    group = Group(3, without)
    for _ in range(4):
        group.step()
    assert set(group.rows) == {ROWS}
    assert len(group.domains) == 3 - len(without)
    for domain in group.domains.values():
        assert f"rank {', '.join(map(str, without))} runs without EpochKV" in domain.alone


def test_a_pass_is_settled_when_later_ones_have_shown_the_same_on_all_ranks() -> None:
    group = Group(2)
    for _ in range(3):
        group.step()
    domain, columns = group.domains[0], group.domains[0].columns
    number = domain.passes
    for later in range(SETTLED):
        assert domain.settled(number, columns) is None, f"{later} passes later"
        group.step()
    assert domain.settled(number, columns) is True
    assert domain.settled(number, (UNKNOWN, UNKNOWN)) is False
    number = domain.passes
    group.claims[1] = UNKNOWN + (1).to_bytes(4, "little")
    group.step()
    assert domain.settled(number, columns) is False
    group.claims[1] = told(1)
    for _ in range(SETTLED + 1):
        group.step()
    assert domain.settled(number, columns) is False, "they are back, and were other ones meanwhile"


def test_what_a_name_depends_on_is_the_order_and_number_of_ranks_and_what_this_one_has_beside_experts() -> None:
    a, b = told(0), told(1)
    names = [domain_digest(own, rest) for own in ([a, b], [b, a], [a], [a, b, b]) for rest in (b"1" * 16, b"2" * 16)]
    assert len(set(names)) == len(names)


def test_a_rank_that_suspects_while_others_are_asked_foretells_nothing_that_nobody_holds() -> None:
    """Else heartbeats would say that other weights had come, by a push."""
    foretold: list[bytes | None] = []

    class Asked(HashStore):
        def multi_get(self, keys: list[str]) -> list[bytes]:
            peers.say(None)
            return super().multi_get(keys)

    store, held = Asked(), bytes([7]) * TOLD_BYTES
    peers = Peers(1, 0, store, lambda: foretold.append(peers.foretold))
    peers.say(held, b"rest")
    eventually(lambda: len(foretold) == 2)
    peers.stop()
    assert foretold == [domain_digest([held], b"rest"), None]


@pytest.mark.parametrize(
    ("name", "of_experts"),
    [
        ("model.layers.0.mlp.experts.routed_experts.w13_weight", True),
        ("model.layers.0.mlp.experts.w2_weight_scale_inv", True),
        ("model.layers.0.mlp.experts.", True),  # packed away
        ("model.layers.0.mlp.experts.e_score_correction_bias", False),  # every rank has it
        ("model.layers.0.mlp.gate.weight", False),
        ("model.layers.0.mlp.shared_experts.gate_up_proj.weight", False),
        ("model.layers.0.feed_forward.w2.weight", False),
        ("model.layers.0.self_attn.qkv_proj.", False),
    ],
)
def test_only_routed_experts_are_parts_of_a_whole(name: str, of_experts: bool) -> None:
    assert is_of_experts(name) is of_experts
