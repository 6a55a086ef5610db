"""What an id of vLLM's stands for: whose requests may have names, and which of them other engines use."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from epochkv_connector import adapter_ids
from epochkv_connector.adapter_ids import AdapterIds
from epochkv_connector.adapters import Version

ONE = Version("digest of one", shareable=True)
OWN = Version("/a#1", shareable=False)


def adapter(number: int = 1, path: str = "/a", name: str = "a", load_inplace: bool = False) -> Any:
    return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=path, load_inplace=load_inplace)


def test_an_adapter_that_nothing_has_happened_to_is_shared() -> None:
    ids = AdapterIds()
    ids.loading(adapter())
    ids.loading(adapter())  # again, from the same place: vLLM keeps what it has
    assert ids.may_name(adapter())
    assert ids.share(adapter(), ONE)
    assert not ids.share(adapter(), OWN)
    assert (ids.replaced(1), ids.num_replaced) == (0, 0)


@pytest.mark.parametrize("other", [adapter(load_inplace=True), adapter(path="/b"), adapter(name="b")])
def test_what_takes_its_place_ends_its_names(other: Any) -> None:
    ids = AdapterIds()
    assert ids.may_name(adapter())
    assert ids.share(adapter(), ONE)
    ids.loading(other)
    assert (ids.replaced(1), ids.replaced(2), ids.num_replaced) == (1, 0, 1)
    assert not ids.share(adapter(), ONE)
    assert not ids.share(adapter(number=2), ONE), "it was mixed with the other one"
    assert ids.share(adapter(number=2), Version("digest of two", shareable=True))
    assert ids.share(adapter(number=3, name="c"), ONE), "names begin with the adapter's"


def test_who_says_another_path_than_vllm_has_loaded_has_no_name() -> None:
    ids = AdapterIds()
    assert ids.may_name(adapter(path="/a"))
    assert not ids.may_name(adapter(path="/b"))
    ids.loading(adapter(path="/b", load_inplace=True))
    assert ids.may_name(adapter(path="/b"))
    assert not ids.may_name(adapter(path="/a"))


def test_requests_that_load_in_place_leave_the_id_without_names() -> None:
    ids = AdapterIds()
    assert ids.may_name(adapter())
    assert not ids.may_name(adapter(load_inplace=True))
    assert not ids.may_name(adapter())
    assert ids.replaced(1) == 1


def test_ids_beyond_the_limit_have_no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_ids, "MAX_ADAPTERS", 1)
    ids = AdapterIds()
    assert ids.may_name(adapter(1))
    ids.loading(adapter(2))
    assert not ids.may_name(adapter(2))
    assert not ids.share(adapter(2), ONE)
    assert ids.may_name(adapter(1))
