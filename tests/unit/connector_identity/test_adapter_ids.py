"""What an id of vLLM's stands for: whose requests may have names, which names end, and which pins still hold."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from epochkv_connector import adapter_ids
from epochkv_connector.adapter_ids import MAX_ROOTS, AdapterIds
from epochkv_connector.identity import Pin

ROOT, OTHER = b"r" * 32, b"o" * 32


def adapter(number: int = 1, path: str = "/a", name: str = "a", load_inplace: bool = False, layout: bool = False) -> Any:
    return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=path, load_inplace=load_inplace, is_3d_lora_weight=layout)


def pin(number: int = 1, root: bytes = ROOT, loads: int = 0, alone: bool = False) -> Pin:
    return Pin(root, 1, saveable=not alone, alone=alone, adapter=number, loads=loads)


REPLACEMENTS = pytest.mark.parametrize("other", [adapter(load_inplace=True), adapter(path="/b"), adapter(name="b"), adapter(layout=True)])


def test_an_adapter_that_nothing_has_happened_to_is_shared() -> None:
    ids = AdapterIds()
    ids.loading(adapter())
    ids.loading(adapter())  # again, from the same place: vLLM keeps what it has
    ids.asked(adapter())
    assert ids.may_name(1)
    assert ids.share(1, ROOT)
    assert ids.holds(pin())
    assert (ids.loads(1), ids.num_changes) == (0, 0)


@REPLACEMENTS
def test_what_is_loaded_in_its_place_ends_its_names(other: Any) -> None:
    ids = AdapterIds()
    ids.asked(adapter())
    assert ids.share(1, ROOT)
    ids.loading(other)
    assert ids.loads(1) == 1
    assert ids.num_changes > 0
    assert not ids.may_name(1)
    assert not ids.share(1, OTHER)
    assert not ids.holds(pin())
    assert not ids.holds(pin(root=OTHER)), "a name of its own"
    assert not ids.holds(pin(root=OTHER, alone=True)), "it holds KV of the weights before"
    assert ids.holds(pin(root=OTHER, loads=1, alone=True))


@REPLACEMENTS
def test_what_requests_bring_in_its_place_ends_its_names_and_none_of_theirs(other: Any) -> None:
    """They would end each other's for ever."""
    ids = AdapterIds()
    ids.asked(adapter())
    assert ids.share(1, ROOT)
    ids.asked(other)
    changes = ids.num_changes
    for _ in range(3):
        ids.asked(other)
        ids.asked(adapter())
    assert ids.num_changes == changes > 0
    assert not ids.may_name(1)
    assert not ids.holds(pin())
    assert ids.holds(pin(root=OTHER, alone=True))


def test_a_name_ends_for_every_id_that_has_it() -> None:
    ids = AdapterIds()
    for number in (1, 2):
        ids.asked(adapter(number))
        assert ids.share(number, ROOT)
    ids.changed(2)
    assert not ids.holds(pin(1))
    assert ids.may_name(1)
    assert not ids.share(1, ROOT)
    assert ids.share(1, OTHER), "of the next epoch"
    assert ids.holds(pin(1, OTHER))


def test_an_id_that_is_loaded_in_place_at_first_has_no_names() -> None:
    ids = AdapterIds()
    ids.loading(adapter(load_inplace=True))
    assert not ids.may_name(1)


def test_only_roots_that_may_come_back_are_remembered() -> None:
    ids = AdapterIds()
    ids.asked(adapter())
    roots = [bytes([number]) * 32 for number in range(MAX_ROOTS + 1)]
    assert all(ids.share(1, root) for root in roots)
    ids.changed(1)
    ids.asked(adapter(2))
    assert [root for root in roots if ids.share(2, root)] == roots[:1]


def test_ids_beyond_the_limit_have_no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_ids, "MAX_ADAPTERS", 1)
    ids = AdapterIds()
    ids.asked(adapter(1))
    ids.loading(adapter(2, load_inplace=True))
    ids.asked(adapter(2))
    ids.changed(2)
    assert ids.loads(2) is None
    assert not ids.may_name(2)
    assert not ids.share(2, ROOT)
    assert not ids.holds(pin(2))
    assert ids.may_name(1)
