"""vLLM's second model runner, the default on GPUs: vLLM's scheduler tells it of requests in another way, and it calls connectors at other
times.
"""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.worker.gpu import kv_connector

from epochkv_connector.connector import EpochKVConnector
from epochkv_connector.engine.interface import KVConnectorRole
from epochkv_connector.wire import StepMetadata
from epochkv_connector.worker.jobs import Report
from epochkv_connector.worker.role import IDLE_WAIT_SECONDS
from tests.scheduler.rigs import MakeRig


def test_a_step_with_tokens_is_never_waited_in(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second runner begins loads behind the forward pass, outside of its context."""
    rig = make_rig(l1_bytes=None)
    connector: Any = EpochKVConnector(rig.vllm_config, KVConnectorRole.WORKER, rig.kv_cache_config)
    monkeypatch.setattr(kv_connector, "get_kv_transfer_group", lambda: connector)
    active = kv_connector.ActiveKVConnector(rig.vllm_config, {})
    waited: list[float] = []

    def results(seconds: float) -> Report:
        waited.append(seconds)
        return Report(set(), set(), [])

    connector._worker.runner = SimpleNamespace(start_step=lambda step: None, finish_step=lambda *args: None, results=results, stats=dict)
    output = SimpleNamespace(kv_connector_metadata=StepMetadata(), has_sync_kv_loads=False, finished_req_ids=set())
    for attention in (None, {"layer0": 1}):
        pre_forward(active, output, attention)
        active.finish_forward()
        active.post_forward(set())
    active.no_forward(output)
    assert waited == [0, 0, IDLE_WAIT_SECONDS]


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
