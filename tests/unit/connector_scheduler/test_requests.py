"""The table of a load's states: whatever happens, vLLM hears of a load once, and of no success whose names have changed."""

import random
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock

import pytest

from epochkv_connector.scheduler.requests import LoadEvent, LoadState, Request, Requests
from epochkv_connector.scheduler.steps import SaveCandidates

OPEN = set(LoadState) - {LoadState.NONE, LoadState.FAILED}


class Load:
    """One request, ranks that report what they were told, and what vLLM heard."""

    def __init__(self, source: random.Random) -> None:
        self.source, self.counters = source, Counter[str]()
        self.requests = Requests(self.counters)
        request = SimpleNamespace(request_id="r", lora_request=SimpleNamespace(lora_int_id=7))
        self.record: Request = self.requests.see(request)
        assert (self.requests.see(request), self.requests.adapters) == (self.record, {7: 1})
        self.overtaken = self.told = False
        self.asked = 0

    def accept(self) -> None:
        if self.record.vllm is not None and self.record.load not in OPEN:
            self.requests.on(self.record, LoadEvent.ACCEPT)
            self.overtaken = False

    def step(self) -> None:
        if self.source.random() < 0.2:
            self.requests.fail_unsent()
        elif self.record.load in (LoadState.ACCEPTED, LoadState.OVERTAKEN):
            self.requests.send(["r"])
            self.told = True
        names = self.requests.names()
        self.asked += len(names)
        assert self.asked <= 1, "asked for a second report"
        assert not (self.asked and self.told), "asked for a report of what is still under way"

    def overtake(self) -> None:
        before = self.counters["invalidated_loads"]
        self.requests.overtake()
        assert self.record.vllm is None or self.counters["invalidated_loads"] - before == (
            self.record.load in (LoadState.OVERTAKEN, LoadState.INVALIDATED) and not self.overtaken
        )
        self.overtaken = True

    def report(self) -> None:
        if not (self.told or self.asked):
            return
        alive = self.record.vllm is not None
        failed = not self.told or self.source.random() < 0.3
        self.told, self.asked = False, 0
        assert (self.requests.report("r", failed=failed) is self.record) == alive
        if alive and not failed:
            assert self.record.load is (LoadState.REPEATED if self.overtaken else LoadState.NONE)
        else:
            assert self.record.load is (LoadState.FAILED if alive else LoadState.NONE)

    def schedule(self) -> None:
        self.requests.schedule({"r"} if self.record.load is LoadState.FAILED else ())

    def finish(self) -> None:
        self.requests.finish("r")

    def run(self) -> None:
        """Random events, then everything to its end."""
        for _ in range(30):
            self.source.choice([self.accept, self.step, self.overtake, self.report, self.schedule])()
            assert self.requests.must_fail == (self.record.load in OPEN - {LoadState.ACCEPTED, LoadState.SENT})
        self.finish()
        for _ in range(40):
            self.source.choice([self.step, self.overtake, self.report])()
        assert not any(self.requests.leak_report().values()), self.requests.leak_report()


def test_no_step_copies_the_names_of_a_prompt_that_was_saved() -> None:
    names, vllm = MagicMock(**{"__len__.return_value": 8}), SimpleNamespace(num_prompt_tokens=8, kv_transfer_params=None)
    state = Mock(hash_block_size=4, **{"names_for_tiers.return_value": names})
    assert SaveCandidates(state, 1, "Prompts")._view(Request("r", vllm, num_offered=2), 16) is None
    names.__getitem__.assert_not_called()


@pytest.mark.parametrize("seed", range(300))
def test_vllm_hears_of_a_load_once_and_of_no_success_whose_names_have_changed(seed: int) -> None:
    Load(random.Random(seed)).run()


def test_a_request_that_ends_keeps_what_vllm_waits_for() -> None:
    requests = Requests(Counter())
    record = requests.see(SimpleNamespace(request_id="r"))
    requests.on(record, LoadEvent.FAIL_UNSENT)
    requests.finish("r")
    assert (len(requests), requests.must_fail, requests.names()) == (0, True, ["r"])
    again = SimpleNamespace(request_id="r")
    assert requests.see(again) is record
    requests.finish("r")
    assert requests.report("r", failed=True) is None
    assert not any(requests.leak_report().values())


@pytest.mark.parametrize(
    ("end", "after"),
    [
        (lambda requests: requests.report("r", failed=False), LoadState.NONE),
        (lambda requests: requests.report("r", failed=True), LoadState.FAILED),
        (lambda requests: requests.schedule({"r"}), LoadState.NONE),
        (lambda requests: requests.finish("r"), LoadState.NONE),
    ],
)
def test_the_load_of_another_connector_is_open_until_somebody_says_more(end: Callable[[Requests], object], after: LoadState) -> None:
    requests = Requests(Counter())
    record = requests.see(SimpleNamespace(request_id="r"))
    requests.on(record, LoadEvent.PASS)
    requests.overtake()
    requests.fail_unsent()
    requests.schedule({"other"})
    assert (record.load, requests.must_fail, requests.names()) == (LoadState.FOREIGN, False, [])
    end(requests)
    assert record.load is after
    requests.schedule({"r"})
    requests.finish("r")
    assert not any(requests.leak_report().values())
