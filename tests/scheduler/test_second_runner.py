"""vLLM's second model runner, the default on GPUs: vLLM's scheduler tells it of requests in another way, and it calls connectors at other
times.
"""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.worker import kv_connector_model_runner_mixin
from vllm.v1.worker.gpu import kv_connector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from epochkv_connector.connector import EpochKVConnector
from epochkv_connector.engine import describe
from epochkv_connector.engine.interface import KVConnectorRole
from epochkv_connector.wire import StepMetadata
from epochkv_connector.worker.jobs import Report
from epochkv_connector.worker.role import IDLE_WAIT_SECONDS, WorkerRole
from tests.scheduler.rigs import TOKENS, WHOLE, MakeRig, every_layout, found, push_out
from tests.support.scheduler import BLOCK


@every_layout
@pytest.mark.parametrize("second", [False, True])
def test_a_resumed_request_is_saved_again(make_rig: MakeRig, second: bool) -> None:
    """Its save has failed, and it completes no further block. The second runner gets it as a new request."""
    rig = make_rig(num_blocks=12, epoch=0)
    rig.scheduler.use_v2_model_runner = second
    (worker,) = rig.workers
    worker.hold_saves = True
    request = rig.add(TOKENS, max_tokens=BLOCK // 2)
    rig.step()
    worker.fail_saves()
    worker.hold_saves = False
    rig.step()
    rig.scheduler._preempt_request(rig.scheduler.running.pop(), 0.0)
    output = rig.step()
    told = [new.req_id for new in output.scheduled_new_reqs], sorted(output.scheduled_cached_reqs.resumed_req_ids)
    assert told == (([request.request_id], []) if second else ([], [request.request_id]))
    rig.run()
    push_out(rig)
    assert found(rig) == WHOLE


def test_a_step_with_tokens_is_never_waited_in(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second runner calls `start_load_kv` behind the forward pass, outside of its context; loads have begun before it."""
    rig = make_rig(l1_bytes=None)
    connector: Any = EpochKVConnector(rig.vllm_config, KVConnectorRole.WORKER, rig.kv_cache_config)
    monkeypatch.setattr(kv_connector, "get_kv_transfer_group", lambda: connector)
    active = kv_connector.ActiveKVConnector(rig.vllm_config, {})
    waited: list[float] = []
    begun: list[StepMetadata] = []

    def results(seconds: float) -> Report:
        waited.append(seconds)
        return Report(set(), set(), [])

    connector._worker.runner = SimpleNamespace(start_step=begun.append, finish_step=lambda *args: None, results=results, stats=dict)
    output = SimpleNamespace(kv_connector_metadata=StepMetadata(), has_sync_kv_loads=False, finished_req_ids=set())
    for step, attention in enumerate((None, {"layer0": 1}), 1):
        pre_forward(active, output, attention)
        assert len(begun) == step
        active.finish_forward()
        active.post_forward(set())
    active.no_forward(output)
    assert waited == [0, 0, IDLE_WAIT_SECONDS]


@pytest.mark.parametrize(("rank", "ends"), [(0, ["stage"]), (1, ["stage"]), (2, []), (3, [])])
def test_with_drafts_every_pipeline_stage_ends_its_steps(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, rank: int, ends: list[str]
) -> None:
    """The first runner tells the last stage alone, behind the drafts: the others have compared their weights by then."""
    rig = make_rig(l1_bytes=None)
    rig.vllm_config.parallel_config.pipeline_parallel_size = rig.vllm_config.parallel_config.tensor_parallel_size = 2
    rig.vllm_config.parallel_config.world_size = 4
    monkeypatch.setattr(rig.vllm_config, "speculative_config", SimpleNamespace())
    monkeypatch.setattr(describe, "worker_rank", lambda config: rank)
    connector: Any = EpochKVConnector(rig.vllm_config, KVConnectorRole.WORKER, rig.kv_cache_config)
    connector.register_kv_caches({})
    ended: list[str] = []
    monkeypatch.setattr(WorkerRole, "finish", lambda role, metadata: ended.append("stage"))
    monkeypatch.setattr(kv_connector_model_runner_mixin, "get_kv_transfer_group", lambda: connector)
    monkeypatch.setattr(kv_connector_model_runner_mixin, "get_forward_context", lambda: SimpleNamespace(attn_metadata={}))
    output: Any = SimpleNamespace(kv_connector_metadata=StepMetadata(), has_sync_kv_loads=False, finished_req_ids=set())
    with KVConnectorModelRunnerMixin._get_kv_connector_output(output, defer_finalize=True):
        assert ended == []
    assert ended == ends


def pre_forward(active: Any, output: Any, attention: Any) -> None:
    """As the runner does with the graph of a whole pass (which has `attention`), and with any other."""
    told = {"request_state_indices": None, "request_ids": ["r1"], "num_tokens": 7}
    if "input_batch" in inspect.signature(active.pre_forward).parameters:
        batch = SimpleNamespace(idx_mapping=None, req_ids=["r1"], num_tokens=7)
        active.pre_forward(output, batch, attn_metadata=attention)
    elif attention is None:
        active.pre_forward(scheduler_output=output, **told)
    else:
        active.pre_forward(scheduler_output=output, **told, attn_metadata=attention)
