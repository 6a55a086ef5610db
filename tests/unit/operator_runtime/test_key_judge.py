"""What a pool's Secret should hold after any edit: what is remembered counts, else what can be derived, else something new."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epochkv_fence.net import KeyPair, generate_keypair
from epochkv_operator import keys as judge
from epochkv_operator.keys import CHECK, FIRST, GENERATION, HUB, KEY, PREVIOUS, PUBLIC, ROOT, FenceKeys, content, decoded, encoded

POOL, HUB_KEY = "uid-1", generate_keypair().public
OTHER = generate_keypair()
KEYS = judge.made(HUB_KEY, 0)
ROTATING = replace(KEYS, client=generate_keypair(), generation=1, previous=KEYS.client.public)


def edited(keys: FenceKeys, **fields: str | None) -> dict[str, str]:
    """The Secret after somebody set fields (by their last word), or removed them (None)."""
    names = {name.replace(".", "_"): name for name in judge.FIELDS}
    found = content(keys, POOL)
    for short, value in fields.items():
        found.pop(names[short], None)
        if value is not None:
            found[names[short]] = value
    return found


def seen(keys: FenceKeys, found: dict[str, str], asked: int = 0, drawn: KeyPair | None = None) -> judge.Judged:
    return judge.remembered(keys, found, POOL, asked, drawn)


def fresh(found: dict[str, str], asked: int = 0) -> judge.Judged:
    return judge.judged(found, HUB_KEY, POOL, asked)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        ({"root_secret": "ab" * 32}, "root.secret was changed"),
        ({"root_secret": None}, "root.secret was removed"),
        ({"root_check": "0" * 32}, "root.check was changed"),
        ({"generation": "7"}, "generation was changed"),
        ({"hub_pub": OTHER.public}, "hub.pub was changed"),
        ({"client_pub": OTHER.public, "client_key": OTHER.secret}, "client.pub was changed"),
        ({"client_key": "garbage"}, "client.key was changed"),
        ({"first_pub": None}, "first.pub was removed"),
        ({"previous_pub": OTHER.public}, "previous.pub was added"),
    ],
)
def test_while_the_operator_runs_what_it_remembers_counts(edit: dict[str, str | None], said: str) -> None:
    verdict = seen(KEYS, edited(KEYS, **edit))
    assert verdict.keys == KEYS
    assert said in verdict.changes
    assert not [value for value in (KEYS.client.secret, KEYS.root_secret, OTHER.secret) if value in str(verdict.changes)]


def test_an_older_key_may_be_taken_out_by_hand_and_only_alone() -> None:
    assert seen(ROTATING, edited(ROTATING, previous_pub=None), 1) == judge.Judged(replace(ROTATING, previous=None))
    both = seen(ROTATING, edited(ROTATING, previous_pub=None, root_secret="ab" * 32), 1)
    assert both.keys == ROTATING
    assert both.changes == ("root.secret was changed", "previous.pub was removed")


def test_a_rotation_that_the_spec_asks_for_is_no_edit() -> None:
    """Its write was ours and unanswered, or the leader's before."""
    found = content(ROTATING, POOL)
    assert seen(KEYS, found, 1) == judge.Judged(ROTATING)
    assert seen(KEYS, found, 0).keys == KEYS, "nobody asked for it"
    assert seen(KEYS, {**found, ROOT: "ab" * 32}, 1).keys == KEYS
    assert seen(KEYS, {**found, PREVIOUS: OTHER.public}, 1).keys == KEYS
    alone = {name: value for name, value in found.items() if name != PREVIOUS}
    assert seen(KEYS, alone, 1).keys == KEYS, "engines with the older key would be rejected"
    assert seen(KEYS, alone, 1, drawn=ROTATING.client).keys == replace(ROTATING, previous=None), "ours, and cut by hand since"


def test_what_is_as_it_was_made_is_believed_by_the_next_operator() -> None:
    for keys in (KEYS, ROTATING):
        assert fresh(content(keys, POOL), 1) == judge.Judged(keys)


@pytest.mark.parametrize("field", [ROOT, FIRST, CHECK])
def test_a_root_that_was_changed_while_no_operator_ran_restarts_engines(field: str) -> None:
    value = OTHER.public if field == FIRST else "ab" * (32 if field == ROOT else 16)
    verdict = fresh({**content(KEYS, POOL), field: value})
    assert verdict.keys.first not in (KEYS.first, OTHER.public), "engines restart by this"
    assert verdict.keys.root_secret == ("ab" * 32 if field == ROOT else KEYS.root_secret)
    assert "engines restart" in verdict.changes[0]
    assert verdict.keys.client == KEYS.client


def test_a_secret_of_another_pool_does_not_pass_for_this_ones() -> None:
    assert judge.made_for(content(KEYS, POOL), POOL)
    assert not judge.made_for(content(KEYS, POOL), "uid-2")


@pytest.mark.parametrize("root", [None, "", "xy" * 32, "ab" * 31])
def test_a_root_that_is_lost_is_new(root: str | None) -> None:
    verdict = fresh(edited(KEYS, root_secret=root))
    assert verdict.keys.root_secret != KEYS.root_secret
    assert verdict.keys.first != KEYS.first
    assert "not found any more" in verdict.changes[0]


@pytest.mark.parametrize("key", [None, "garbage"])
def test_a_lost_client_key_is_replaced_as_in_a_rotation(key: str | None) -> None:
    verdict = fresh(edited(KEYS, client_key=key), 3)
    assert verdict.keys.client != KEYS.client
    assert (verdict.keys.previous, verdict.keys.generation) == (KEYS.client.public, 3)
    assert (verdict.keys.first, verdict.keys.root_secret) == (KEYS.first, KEYS.root_secret), "nothing restarts"


def test_a_public_key_follows_from_the_secret_one() -> None:
    verdict = fresh(edited(KEYS, client_pub=OTHER.public))
    assert verdict.keys == KEYS
    assert verdict.changes == ("client.pub did not belong to client.key and is derived from it again",)


@pytest.mark.parametrize("generation", ["9", "-1", "many", "1" * 400])
def test_a_generation_that_nobody_asked_for_says_nothing(generation: str) -> None:
    """It is below what is asked for, so the pair is rotated, and what the condition says about it is true."""
    verdict = fresh(edited(replace(KEYS, generation=2), generation=generation), 2)
    assert verdict.keys.generation == 0
    assert "the key pair is replaced" in verdict.changes[0]


def test_another_key_of_the_hub_and_no_key_are_told_apart() -> None:
    assert "is the hub's again" in fresh(edited(KEYS, hub_pub="no key")).changes[0]
    other = fresh(edited(KEYS, hub_pub=OTHER.public))
    assert other.keys == KEYS
    assert "restart" in other.changes[0]


TEXTS = st.sampled_from(["", "garbage", "0" * 64, OTHER.public, OTHER.secret, HUB_KEY, KEYS.client.public, "1", "99", "\u00e9" * 64])


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(judge.FIELDS), TEXTS | st.none()), st.booleans(), st.integers(0, 2))
def test_any_edit_ends_in_a_secret_that_needs_no_other(edit: dict[str, str | None], rotating: bool, asked: int) -> None:
    base = ROTATING if rotating else KEYS
    found = {name: value for name, value in ({**content(base, POOL), **edit}).items() if value is not None}
    assert decoded({"data": encoded(found)}) == found
    first = fresh(found, asked)
    assert fresh(content(first.keys, POOL), asked) == judge.Judged(first.keys)
    again = seen(base, found, asked)
    assert content(again.keys, POOL)[HUB] == HUB_KEY
    assert seen(again.keys, content(again.keys, POOL), asked) == judge.Judged(again.keys)


def test_fields_that_are_no_text_are_empty() -> None:
    assert decoded({"data": {KEY: "!", PUBLIC: "/w==", GENERATION: None}}) == {KEY: "", PUBLIC: "", GENERATION: ""}
