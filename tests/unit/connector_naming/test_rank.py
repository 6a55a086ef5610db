"""What one rank knows of its weights: questions, comparisons behind steps, writes in between; and that it never raises."""

from collections.abc import Callable, Iterator
from functools import wraps
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from epochkv_connector.weights import rank
from epochkv_connector.weights.rank import digest_weights, end_device_work, held_by, is_unchanged
from epochkv_connector.wire import RankLayout
from epochkv_fence.protocol.messages import ASLEEP

ids = count()


class Model(nn.Module):
    """Two matrices, written as vLLM's models are."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(40, 30), requires_grad=False)
        self.second = nn.Parameter(torch.randn(30, 40), requires_grad=False)
        self.loaded: list[Any] = []

    def load_weights(self, weights: Any) -> set[str]:
        self.loaded.append(weights)
        for name, tensor in weights:
            getattr(self, name).copy_(tensor)
        return {name for name, _ in weights}


class Worker:
    def __init__(self, model: nn.Module | None = None, number: int = 0) -> None:
        self.model = model or Model()
        self.rank = number
        self.engine = f"engine{next(ids)}"
        self.vllm_config = SimpleNamespace(kv_transfer_config=SimpleNamespace(engine_id=self.engine))

    def get_model(self) -> Any:
        return self.model

    @property
    def held(self) -> rank.Held:
        return held_by(self.engine)


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker(number=3)
    yield made
    rank._ranks.pop(made.engine, None)


def test_it_is_as_asked_until_something_is_written_and_only_for_the_last_question(worker: Worker) -> None:
    assert not is_unchanged(worker, 0)
    digest_weights(worker, 1)
    assert is_unchanged(worker, 1)
    assert not is_unchanged(worker, 0)
    worker.model.first += 1
    assert not is_unchanged(worker, 1)
    digest_weights(worker, 2)
    assert is_unchanged(worker, 2)


def test_who_sleeps_is_not_looked_at_whatever_the_call_was_called(worker: Worker) -> None:
    """A method of a worker's own leads to vLLM's, fails after it, and `wake_up` comes in parts."""

    def sleep(level: int = 1) -> None:
        worker.model.first = nn.Parameter(torch.empty(3, device="meta"))
        if level == 2:
            raise AssertionError("Memory usage increased after sleeping")

    kept, woken, settled = worker.model.first, list[str](), [1, 0, 0]
    worker.sleep, worker.wake_up, worker.discard = sleep, lambda tags: None, lambda tags: None  # type: ignore[attr-defined]
    copies = SimpleNamespace(settle_for_sleep=lambda seconds: settled.pop(0), woken=lambda: woken.append("copies"))
    worker.held.runners = [copies]  # type: ignore[assignment]
    rank.layout(worker)
    with pytest.raises(RuntimeError, match="1 copies of KV blocks still run"):
        worker.discard(("kv_cache",))  # type: ignore[attr-defined]
    worker.sleep()  # type: ignore[attr-defined]
    with pytest.raises(AssertionError, match="Memory usage"):
        worker.sleep(level=2)  # type: ignore[attr-defined]
    for number, tags in enumerate((["weights"], ["kv_cache"]), 2):
        answer = digest_weights(worker, number)
        assert (answer["weights"], answer["note"], answer["naps"]) == (b"", ASLEEP, 2)
        assert rank.digest_adapters(worker, number, [], afresh=True)["note"].endswith(ASLEEP)
        worker.wake_up(tags)  # type: ignore[attr-defined]
    worker.model.first = kept
    assert woken == ["copies"] * 2
    assert not is_unchanged(worker, 3)
    assert digest_weights(worker, 4)["weights"]


# ---------------------------------------------------------------------------------------------- what cannot be told
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda worker: setattr(worker, "get_model", Mock(side_effect=RuntimeError("no model yet"))), "RuntimeError: no model yet"),
        (lambda worker: setattr(worker, "vllm_config", None), "AttributeError"),
        (lambda worker: setattr(worker.model, "first", nn.Parameter(torch.empty(3, device="meta"))), "first is on meta"),
    ],
)
def test_what_cannot_be_read_is_unknown_with_a_note_and_raises_nothing(worker: Worker, change: Callable[[Worker], None], says: str) -> None:
    digest_weights(worker, 1)
    change(worker)
    answer = digest_weights(worker, 2)
    assert answer["weights"] is None
    assert says in answer["note"]
    assert (answer["number"], answer["rank"], answer["alone"]) == (2, 3, "")
    assert not is_unchanged(worker, 2)
    assert not is_unchanged(worker, 1) or worker.held.number == 1  # a rank that is not ours any more keeps its tiers elsewhere
    assert end_device_work(worker) in (True, False)


def test_only_weights_that_a_kernel_hides_are_hidden_for_good(worker: Worker) -> None:
    worker.model.hiding = layer = nn.Linear(2, 2, bias=False)
    layer.quant_method, layer.weight = Mock(old_quant_method=None), nn.Parameter(torch.empty(0))
    answer = digest_weights(worker, 1)
    assert (answer["weights"], answer["alone"]) == (None, answer["note"])
    assert "hiding" in answer["alone"]


def test_a_question_that_failed_leaves_nothing_to_compare_with(worker: Worker) -> None:
    digest_weights(worker, 1)
    kept = worker.model.first
    worker.model.first = nn.Parameter(torch.empty(3, device="meta"))
    digest_weights(worker, 2)
    worker.model.first = kept
    assert not is_unchanged(worker, 1)
    assert not is_unchanged(worker, 2)
    assert not worker.held.compare(1).holds()


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (lambda model: model.second.add_(1), "written while they were read"),
        (lambda model: model.load_weights([]), ""),
        (lambda model: setattr(model.first, "data", model.first.data.clone()), ""),
    ],
    ids=["written", "loaded", "moved"],
)
def test_weights_that_change_while_they_are_read_are_unknown(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, write: Callable[[Model], object], says: str
) -> None:
    digest_weights(worker, 0)
    digest = rank.digest  # type: ignore[attr-defined]

    def digesting(*args: Any, **kwargs: Any) -> Any:
        found = digest(*args, **kwargs)
        write(worker.model)  # type: ignore[arg-type]
        return found

    monkeypatch.setattr(rank, "digest", digesting)
    answer = digest_weights(worker, 1)
    assert answer["weights"] is None
    assert says in answer["note"]
    assert not worker.held.compare(1).holds()


# ---------------------------------------------------------------------------------------------- load_weights
def test_load_weights_still_loads_and_is_counted_once_before_and_once_after(worker: Worker) -> None:
    for number in range(3):
        digest_weights(worker, number)
        end_device_work(worker)
    assert worker.model.load_weights([("first", torch.zeros(40, 30))]) == {"first"}
    assert not worker.model.first.any()
    assert worker.held.writes == 2


def test_a_load_that_wrote_nothing_is_a_write_until_somebody_looks(worker: Worker) -> None:
    before = digest_weights(worker, 1)["weights"]
    worker.model.load_weights([])
    assert not is_unchanged(worker, 1)
    assert digest_weights(worker, 2)["weights"] == before
    assert is_unchanged(worker, 2)


def test_a_load_that_raises_is_counted_and_raises(worker: Worker) -> None:
    digest_weights(worker, 1)
    with pytest.raises(AttributeError):
        worker.model.load_weights([("third", torch.zeros(1))])
    assert worker.held.writes == 2


def test_a_second_engine_with_the_same_model_takes_the_wrapper_over(worker: Worker) -> None:
    other = Worker(worker.model)
    digest_weights(worker, 1)
    digest_weights(other, 1)
    other.model.load_weights([])
    assert (worker.held.writes, other.held.writes) == (0, 2)


def test_a_load_weights_that_somebody_else_has_wrapped_stays_whole() -> None:
    """`functools.wraps` leaves `__wrapped__` on every decorated method, and that is a function without its object."""

    def noted(load: Any) -> Any:
        @wraps(load)
        def load_weights(self: Any, weights: Any) -> Any:
            self.notes = [*getattr(self, "notes", []), "noted"]
            return load(self, weights)

        return load_weights

    class Decorated(Model):
        load_weights = noted(Model.load_weights)

    worker = Worker(Decorated())
    digest_weights(worker, 1)
    assert worker.model.load_weights([("first", torch.zeros(40, 30))]) == {"first"}
    assert worker.model.notes == ["noted"]
    assert worker.held.writes == 2


def test_a_model_without_load_weights_can_be_asked() -> None:
    assert digest_weights(Worker(nn.Linear(3, 3)), 1)["weights"] is not None


# ---------------------------------------------------------------------------------------------- comparisons behind steps
@pytest.mark.parametrize(
    ("during", "behind", "holds"),
    [
        (lambda worker: worker.model.first.add_(1), lambda worker, look: worker.model.first.sub_(1), False),
        (lambda worker: None, lambda worker, look: worker.model.load_weights([]), False),
        # The device was waited for before it began, so the step was over.
        (lambda worker: None, lambda worker, look: end_device_work(worker) and worker.model.load_weights([]), True),
        (lambda worker: None, lambda worker, look: look.holds() and worker.model.load_weights([]), True),
    ],
    ids=["written", "loaded", "announced", "looked-at"],
)
def test_what_was_there_when_the_step_was_over_counts(worker: Worker, during: Any, behind: Any, holds: bool) -> None:
    digest_weights(worker, 1)
    during(worker)
    look = worker.held.compare(1)
    assert behind(worker, look) is not False
    assert look.holds() is holds


@pytest.mark.parametrize("swap", ["data", "parameter"])
def test_a_comparison_of_a_step_sees_storages_that_were_swapped(worker: Worker, swap: str) -> None:
    """The sample alone would go on looking at memory that nobody computes with; equal tensors do not stay so."""
    digest_weights(worker, 1)
    same = worker.model.first.data.clone()
    if swap == "data":
        worker.model.first.data = same
    else:
        worker.model.first = nn.Parameter(same)
    assert not worker.held.compare(1).holds()
    assert not is_unchanged(worker, 1)


def test_a_list_of_tensors_whose_item_was_swapped_is_seen(worker: Worker) -> None:
    worker.model.tables = [torch.zeros(3), torch.zeros(3)]
    digest_weights(worker, 1)
    assert worker.held.compare(1).holds()
    worker.model.tables[1] = torch.zeros(3)
    assert not worker.held.compare(1).holds()
    digest_weights(worker, 2)
    worker.model.tables.pop()
    assert not worker.held.compare(2).holds()


def test_tensors_inside_a_wrapper_can_be_asked_for_and_are_watched() -> None:
    """As torchao keeps quantised weights: the outer tensor has no memory of its own."""
    from torch.testing._internal.two_tensor import TwoTensor

    model = Model()
    inner = torch.randn(40, 30)
    model.first = nn.Parameter(TwoTensor(inner, torch.randn(40, 30)), requires_grad=False)
    worker = Worker(model)
    answer = digest_weights(worker, 1)
    assert answer["weights"] is not None, answer["note"]
    assert is_unchanged(worker, 1)
    inner += 1
    assert not is_unchanged(worker, 1)
    assert digest_weights(worker, 2)["weights"] != answer["weights"]


def test_a_rank_that_nobody_has_measured_says_what_runs_its_layers() -> None:
    """The fence alone has no host memory to lay out; engines of other kernels must not share all the same."""

    class Other:
        """Another backend."""

    def worker(name: str, backend: type, dtype: str = "auto", connector: str | None = None) -> Any:
        layer = SimpleNamespace(get_attn_backend=lambda: backend, kv_cache_dtype=dtype)
        layers = SimpleNamespace(static_forward_context={"model.0": layer, "model.1": SimpleNamespace()})
        transfer = None if connector is None else SimpleNamespace(engine_id=connector)
        return SimpleNamespace(vllm_config=SimpleNamespace(instance_id=name, kv_transfer_config=transfer, compilation_config=layers))

    one = rank.layout(worker("a", dict))
    assert len(one.digest) == 16
    assert one == rank.layout(worker("b", dict)) == rank.layout(worker("c", dict, connector="d"))
    assert one.digest != rank.layout(worker("e", Other)).digest
    assert one.digest != rank.layout(worker("f", dict, "fp8")).digest
    rank.held_by("g").layout = measured = RankLayout(b"1" * 16, 3, {0: 5})
    assert rank.layout(worker("g", dict)) == measured
