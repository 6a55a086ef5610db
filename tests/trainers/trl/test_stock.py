"""Why it takes names: the same run of TRL with vLLM's own MooncakeStoreConnector answers from KV of older weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from hack.demo.stock import stock_connector
from hack.standalone.mooncake import Mooncake
from tests.engine.conftest import PATIENT_ENVIRON
from tests.trainers.trl import grpo, server

pytestmark = pytest.mark.timeout(1200)  # two servers, and their training


def test_vllms_own_store_connector_goes_on_with_old_kv(uncached: grpo.Run, model: Path, tmp_path: Path) -> None:
    with Mooncake(tmp_path) as mooncake:
        connector, environ = stock_connector(tmp_path, mooncake)
        engine = server.start("stock", model, tmp_path, connector, {**PATIENT_ENVIRON, **environ})
        try:
            engine.wait_ready(server.START_SECONDS)
            run = server.train(engine, model, tmp_path / "trained", lambda: server.hits(engine))
        finally:
            engine.end()
    assert run.batches[0].completions == uncached.batches[0].completions
    found = run.batches[2].observed.since(run.batches[1].observed)
    assert found.both > server.BATCH.max_hits, "the second step finds what the first has left"
    assert run.completions != uncached.completions
