"""P/D on real engines: NIXL brings KV from P to D, beside our tiers. D shares what came under our tag, and nothing else.

`make test-transfers` runs this, and `make test` does not: a thread of NIXL keeps a core of each engine busy.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hack.standalone.mooncake import Mooncake
from hack.standalone.pool import Pool
from tests.engine.conftest import Prompts, Reference, Weights, check
from tests.engine.server_nursery import ServerNursery
from tests.engine.transfers_lab import BROUGHT, Duo

pytest.importorskip("nixl", reason="make test-transfers installs NIXL, whose threads keep a core of each engine busy")


@pytest.fixture(scope="module")
def duo(folder: Path, mooncake: Mooncake, weights: Weights, servers: ServerNursery) -> Iterator[Duo]:
    """Both engines; after the tests neither holds a block, and nothing has failed."""
    with Pool(folder, lease_seconds=300.0) as pool:  # more than a loaded machine stands still
        duo = Duo(folder, pool, mooncake, weights, servers)
        try:
            for engine in (duo.p, duo.d):
                engine.wait_ready()
            pool.wait_engines(2)
            yield duo
            duo.check_quiet()
        finally:
            duo.end()


def without_tag(duo: Duo, handed: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in handed.items() if key != "epochkv_tag"}


def with_other_weights(duo: Duo, handed: dict[str, Any]) -> dict[str, Any]:
    return {**handed, "epochkv_tag": {**handed["epochkv_tag"], "weights": "00" * 32}}


def after_an_epoch(duo: Duo, handed: dict[str, Any]) -> dict[str, Any]:
    assert duo.pool.bump() == handed["epochkv_tag"]["epoch"] + 1
    return handed


def test_what_comes_under_our_tag_is_shared(duo: Duo, prompts: Prompts, reference: Reference) -> None:
    prompt = prompts()
    duo.check_shared(prompt, reference(prompt, duo.model))


@pytest.mark.parametrize("spoil", [without_tag, with_other_weights, after_an_epoch])
def test_what_comes_without_it_is_its_requests_alone(
    duo: Duo, prompts: Prompts, reference: Reference, spoil: Callable[[Duo, dict[str, Any]], dict[str, Any]]
) -> None:
    prompt = prompts()
    expected = reference(prompt, duo.model)
    check(duo.check_foreign(prompt, lambda handed: spoil(duo, handed)), BROUGHT, expected)
    check(duo.d.complete(prompt), 0, expected)


def test_kv_of_other_weights_is_found_by_nobody(duo: Duo, prompts: Prompts, reference: Reference, weights: Weights) -> None:
    """D has new weights, and P has not. NIXL does not look at them, so the request itself is answered from P's."""
    prompt, other, new = prompts(), prompts(), weights.after(duo.model)
    duo.d.reload_weights(new)
    duo.check_foreign(prompt)
    check(duo.d.complete(prompt), 0, reference(prompt, new))
    duo.p.reload_weights(new)
    duo.model = new
    duo.check_shared(other, reference(other, new))
