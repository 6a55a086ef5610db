"""What every authority must do, as one suite: `epochkv_fence.protocol.pool`'s promises, terms, crashes and late writes.

Subclass `AuthorityConformance` in a module of tests, name the class `Test...` and say in `authorities` how such a thing is
made; pytest fixtures reach it through an autouse fixture that sets attributes. Nothing here knows what is behind it.
"""

import abc
import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import pytest

from epochkv_fence.protocol.messages import MAX_LABELS, Source
from epochkv_fence.protocol.pool import Authority, AuthorityError, PoolRecord, Term, merged_labels

BODY_SECONDS = 120.0
TRAINER, OWNER, ENGINE = Source.TRAINER, Source.SPEC, Source.ENGINE


def source_of(epoch: int) -> Source:
    """One for each epoch, so that a mix of two writes shows."""
    return (TRAINER, OWNER, ENGINE)[epoch % 3]


class Authorities(Protocol):
    """One durable memory with one pool in it, and processes that lead one after the other.

    Attributes:
        uid: of the pool, which nobody has written to yet.
    """

    uid: str

    async def take_over(self) -> tuple[Authority, Term]:
        """Another process takes the lead. The one before may be dead; whoever asks it afterwards may get an
        `AuthorityError`, and what it still writes may land late."""


class AuthorityConformance(abc.ABC):
    """The suite. Every test gets a fresh memory and a fresh pool."""

    @abc.abstractmethod
    def authorities(self) -> AbstractAsyncContextManager[Authorities]:
        """Fresh ones, removed when the context ends."""

    @contextlib.asynccontextmanager
    async def fresh(self) -> AsyncIterator[Authorities]:
        """Fresh ones, for a test that has a deadline."""
        async with self.authorities() as world, asyncio.timeout(BODY_SECONDS):
            yield world

    # ------------------------------------------------------------------ terms (promise 1)
    async def test_only_the_current_term_is_verified(self) -> None:
        async with self.fresh() as world:
            authority, term = await world.take_over()
            assert await authority.verify(term)
            assert not await authority.verify(Term(term.holder, term.transitions - 1))
            assert not await authority.verify(Term(term.holder, term.transitions + 1))
            assert not await authority.verify(Term(term.holder + "x", term.transitions))
            assert await authority.verify(term)

    async def test_a_term_ends_with_the_next_one(self) -> None:
        async with self.fresh() as world:
            first, old = await world.take_over()
            assert await first.verify(old)
            second, new = await world.take_over()
            assert new.holder != old.holder
            assert new.transitions > old.transitions
            assert await second.verify(new)
            assert not await second.verify(old)
            with contextlib.suppress(AuthorityError):  # a process that is gone cannot say; it must not say yes
                assert not await first.verify(old)

    # ------------------------------------------------------------------ reading (promise 2)
    async def test_a_pool_that_is_none_is_gone(self) -> None:
        async with self.fresh() as world:
            authority, _ = await world.take_over()
            other = "00000000-0000-4000-8000-000000000000"
            for call in (authority.load(other), authority.record(other, 1), authority.publish(other, 1), authority.note_granting(other)):
                with pytest.raises(AuthorityError, match=r"no pool|not registered"):
                    await call
            assert await authority.load(world.uid) == PoolRecord()

    # ------------------------------------------------------------------ writing (promise 3)
    async def test_publish_never_passes_the_target(self) -> None:
        async with self.fresh() as world:
            authority, _ = await world.take_over()
            await authority.record(world.uid, 6, TRAINER)
            await authority.publish(world.uid, 4)
            with contextlib.suppress(AuthorityError):  # either refused, or the lost target comes back with it
                await authority.publish(world.uid, 9)
            record = await authority.load(world.uid)
            assert record in (PoolRecord(6, 4, False, TRAINER), PoolRecord(9, 9, False, TRAINER))

    async def test_labels_are_added_and_the_newest_stay(self) -> None:
        async with self.fresh() as world:
            first, _ = await world.take_over()
            known: dict[bytes, str] = {}
            for number in range(MAX_LABELS + 4):
                added = {bytes([number]) * 16: f"ü step-{number}", bytes([number, 1]) * 8: "x" * 253}
                await first.note_labels(world.uid, added)
                known = merged_labels(known, added)
            found = (await first.load(world.uid)).labels
            assert list(found.items()) == list(known.items())
            assert len(found) == MAX_LABELS
            oldest = list(known)[1]
            await first.note_labels(world.uid, {oldest: "again"})
            await first.record(world.uid, 2, TRAINER)
            await first.publish(world.uid, 2)
            second, _ = await world.take_over()
            record = await second.load(world.uid)
            assert record == PoolRecord(2, 2, False, TRAINER, merged_labels(known, {oldest: "again"}))
            assert list(record.labels)[-1] == oldest
            with pytest.raises(AuthorityError, match=r"no pool|not registered"):
                await second.note_labels("00000000-0000-4000-8000-000000000000", known)

    async def test_of_two_that_label_at_once_neither_is_lost(self) -> None:
        async with self.fresh() as world:
            authority, _ = await world.take_over()
            added = [{bytes([number]) * 16: f"step-{number}"} for number in range(8)]
            await asyncio.gather(*(authority.note_labels(world.uid, labels) for labels in added))
            found = (await authority.load(world.uid)).labels
            assert dict(found) == {weights: label for labels in added for weights, label in labels.items()}

    async def test_late_writes_of_a_deposed_process_lower_nothing(self) -> None:
        async with self.fresh() as world:
            first, _ = await world.take_over()
            await first.record(world.uid, 2, TRAINER)
            second, _ = await world.take_over()
            await second.record(world.uid, 7, OWNER)
            await second.publish(world.uid, 7)
            await second.note_granting(world.uid)
            for late in (first.record(world.uid, 3, ENGINE), first.publish(world.uid, 2), first.record(world.uid, 7, ENGINE)):
                with contextlib.suppress(AuthorityError):
                    await late
            assert await second.load(world.uid) == PoolRecord(7, 7, True, OWNER)

    async def test_a_call_that_is_given_up_lowers_nothing(self) -> None:
        async with self.fresh() as world:
            authority, term = await world.take_over()
            await authority.record(world.uid, 1, TRAINER)
            loop = asyncio.get_running_loop()
            for epoch in range(2, 12):
                task = loop.create_task(authority.record(world.uid, epoch, TRAINER))
                await asyncio.sleep(0.0005 * (epoch % 4))
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            before = (await authority.load(world.uid)).target
            assert 1 <= before <= 11
            await authority.record(world.uid, 20, OWNER)  # whatever was given up and still lands is below this
            assert (await authority.load(world.uid)).target == 20
            assert await authority.verify(term)

    async def test_many_writers_end_at_the_maximum_and_nobody_sees_a_step_down(self) -> None:
        async with self.fresh() as world:
            authority, _ = await world.take_over()
            rng = random.Random(4)
            epochs = [rng.randrange(1, 60) for _ in range(24)]
            seen: list[PoolRecord] = []

            async def watch() -> None:
                while True:
                    seen.append(await authority.load(world.uid))
                    await asyncio.sleep(0)

            watcher = asyncio.create_task(watch())

            async def write(epoch: int) -> None:
                await authority.record(world.uid, epoch, source_of(epoch))
                await authority.publish(world.uid, epoch)

            try:
                await asyncio.gather(*(write(epoch) for epoch in epochs))
            finally:
                watcher.cancel()
                await asyncio.gather(watcher, return_exceptions=True)
            top = max(epochs)
            assert await authority.load(world.uid) == PoolRecord(top, top, False, source_of(top))
            assert seen
            for earlier, later in itertools.pairwise(seen):
                assert earlier.target <= later.target
                assert earlier.published <= later.published <= later.target
            for record in seen:
                assert record.origin == (source_of(record.target) if record.target else None)

    @pytest.mark.parametrize("seed", range(4))
    async def test_any_sequence_of_calls_and_take_overs_is_a_maximum(self, seed: int) -> None:
        async with self.fresh() as world:
            rng = random.Random(seed)
            authority, term = await world.take_over()
            target = published = 0
            granting, origin = False, None
            for _ in range(30):
                match rng.choice(("record", "record", "publish", "note", "verify", "take over")):
                    case "record":
                        asked, who = rng.randrange(12), rng.choice((TRAINER, OWNER, ENGINE))
                        await authority.record(world.uid, asked, who)
                        if asked > target:
                            target, origin = asked, who
                    case "publish":
                        epoch = rng.randrange(target + 1)
                        await authority.publish(world.uid, epoch)
                        published = max(published, epoch)
                    case "note":
                        await authority.note_granting(world.uid)
                        granting = True
                    case "verify":
                        assert await authority.verify(term)
                    case "take over":
                        authority, term = await world.take_over()
                assert await authority.load(world.uid) == PoolRecord(target, published, granting, origin)
