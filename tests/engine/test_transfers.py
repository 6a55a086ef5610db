"""P/D on real engines: NIXL brings KV from P to D, beside our tiers. D shares what came under our tag, and nothing else.

`make test-transfers` runs this, and `make test` does not: a thread of NIXL keeps a core of each engine busy.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hack.engine_api import Answer
from hack.loopback import free_port
from hack.standalone.engine import Engine
from hack.standalone.mooncake import Mooncake
from hack.standalone.pool import Pool
from hack.waiting import eventually
from tests.engine import conftest
from tests.engine.conftest import Prompts, Reference, Weights, check, settled_keys
from tests.support.nursery import Nursery

pytest.importorskip("nixl", reason="make test-transfers installs NIXL, whose threads keep a core of each engine busy")

BROUGHT = conftest.PROMPT_TOKENS
"""Tokens of which NIXL brings KV, and which vLLM counts as cached."""
HAND_OVER = {"do_remote_decode": True, "do_remote_prefill": False}
"""What a proxy puts into the request to the producer."""
NIXL = {
    "kv_connector": "NixlConnector",
    "kv_buffer_device": "cpu",
    "kv_connector_extra_config": {
        "kv_lease_duration": 240,  # a tag is good for half of it, on a machine that stands still, too
        "num_threads": 0,  # of its four, each would keep a core busy
    },
}
FAILURES = ("epochkv_errors_total", "epochkv_loads_failed_total", "nixl_num_failed_transfers_total", "nixl_num_failed_notifications_total")


def beside_nixl(ours: Mapping[str, Any], role: str) -> dict[str, Any]:
    """`--kv-transfer-config` of an engine with both connectors. `role`: NIXL's."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [dict(ours), {**NIXL, "kv_role": role}]},
    }


class Duo:
    """Engines P and D of a pool.

    Attributes:
        model: the weights that both have between tests.
        num_foreign: requests of D whose KV P has brought without a good tag.
    """

    def __init__(self, folder: Path, pool: Pool, mooncake: Mooncake, weights: conftest.Weights, servers: Nursery) -> None:
        self.pool, self.mooncake, self.model, self.num_foreign = pool, mooncake, weights.base, 0

        def start(name: str, role: str, ours: Mapping[str, Any]) -> Engine:
            side_channel = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
            environ = {**conftest.PATIENT_ENVIRON, **side_channel, "EPOCHKV_ENGINE_NAME": name, "UCX_TLS": "tcp,self"}
            return Engine(name, weights.base, folder, beside_nixl(ours, role), environ=environ, popen=servers.popen)

        self.p = start("P", "kv_producer", {**pool.connector(None, mooncake.address, **conftest.PATIENT), "kv_role": "kv_consumer"})
        self.d = start("D", "kv_consumer", pool.connector(conftest.L1_BYTES, mooncake.address, **conftest.PATIENT))

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        """P computes the prompt; returns what it hands over, as a proxy gets it."""
        answer = self.p.complete(prompt, 1, transfer=HAND_OVER)
        assert answer.transfer is not None
        assert answer.transfer["do_remote_prefill"] is True
        return dict(answer.transfer)

    def decode(self, prompt: list[int], handed: Mapping[str, Any]) -> Answer:
        """D's answer. With the field that is left out, vLLM would tell P's count of cached tokens as D's."""
        return self.d.complete(prompt, transfer={key: value for key, value in handed.items() if key != "remote_prefill_cached_tokens"})

    def check_foreign(self, prompt: list[int], spoil: Callable[[dict[str, Any]], dict[str, Any]] = dict) -> Answer:
        """D takes over what it must not share; none of it reaches the store. Returns D's answer, which NIXL's KV went into.

        Args:
            spoil: makes what D gets of what P hands over. Should be short: until D has read, P keeps a core busy.
        """
        before = settled_keys(self.mooncake)
        answer = self.decode(prompt, spoil(self.prefill(prompt)))
        assert answer.cached == BROUGHT
        assert settled_keys(self.mooncake) <= before  # an epoch sweeps names from before it
        self.num_foreign += 1
        self.d.report_metrics([2, 3, 4])
        assert self.d.metric("vllm:epochkv_requests_renamed_total", how="foreign_kv") == self.num_foreign
        return answer

    def forget(self, engine: Engine) -> None:
        """Empty the engine's own prefix cache, once it holds nothing for anybody: P hears with a step that D has read."""
        eventually(lambda: engine.complete([2, 3, 4], 1) and engine.reset_prefix_cache(external=False), "no block is held", 60.0)

    def check_shared(self, prompt: list[int], expected: tuple[int, ...]) -> None:
        """P computes, D takes over; the store, D's L1 and P find what D took over."""
        before = settled_keys(self.mooncake)
        check(self.decode(prompt, self.prefill(prompt)), BROUGHT, expected)
        eventually(lambda: len(set(self.mooncake.keys()) - before) == conftest.BLOCKS, f"{conftest.BLOCKS} blocks in the store")
        for engine in (self.d, self.p):
            self.forget(engine)
            check(engine.complete(prompt), conftest.CACHED, expected)

    def check_quiet(self) -> None:
        """Neither engine holds a block, and nothing has failed."""
        for engine in (self.p, self.d):
            self.forget(engine)
            engine.report_metrics([2, 3, 4])
            assert {name: engine.metric(f"vllm:{name}") for name in FAILURES} == dict.fromkeys(FAILURES, 0.0)
        assert self.d.metric("vllm:epochkv_requests_renamed_total", how="foreign_kv") == self.num_foreign

    def end(self) -> None:
        with ThreadPoolExecutor() as threads:
            list(threads.map(Engine.end, (self.p, self.d)))


@pytest.fixture(scope="module")
def duo(folder: Path, mooncake: Mooncake, weights: Weights, servers: Nursery) -> Iterator[Duo]:
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


def after_an_epoch(duo: Duo, handed: dict[str, Any]) -> dict[str, Any]:
    assert duo.pool.bump() == handed["epochkv_tag"]["epoch"] + 1
    return handed


def test_what_comes_under_our_tag_is_shared(duo: Duo, prompts: Prompts, reference: Reference) -> None:
    prompt = prompts()
    duo.check_shared(prompt, reference(prompt, duo.model))


@pytest.mark.parametrize("spoil", [without_tag, after_an_epoch])
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
