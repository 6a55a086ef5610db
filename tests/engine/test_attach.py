"""`EPOCHKV_ATTACH` alone joins the engine of a program that knows nothing of connectors, and it has hits of L1."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hack.standalone.engine import CPU_ENVIRONMENT
from hack.standalone.pool import Pool
from hack.standalone.process import Process
from tests.engine.conftest import CACHED, Prompts, Reference, Weights
from tests.engine.server_nursery import ServerNursery

pytestmark = pytest.mark.timeout(900)  # the first test starts two engines


def test_an_engine_joins_by_the_environment_alone(
    weights: Weights, tmp_path: Path, prompts: Prompts, reference: Reference, servers: ServerNursery
) -> None:
    prompt, other, job = prompts(), prompts(), tmp_path / "job.json"
    job.write_text(json.dumps([str(weights.base), prompt, other]))
    with Pool(tmp_path) as pool:
        attached = {"EPOCHKV_ATTACH": "1", "EPOCHKV_CONFIG": str(pool.credentials), "EPOCHKV_LOCAL_CAPACITY": "64Mi"}
        variables = {**CPU_ENVIRONMENT, **attached}
        command = [sys.executable, "-m", "tests.engine.attach_child", str(job)]
        with Process("program", command, tmp_path / "program.log", variables, popen=servers.popen) as program:
            pool.wait_engines(1, 240)
            (tmp_path / "shares").touch()
            try:
                program.popen.wait(240)
            except subprocess.TimeoutExpired:
                pytest.fail(f"the program hangs:\n{program.tail(60)}")
    log = program.log.read_text()
    results = [line for line in log.splitlines() if line.startswith("RESULT ")]
    assert results, program.tail(60)
    cleared, first, second, again = json.loads(results[0].removeprefix("RESULT "))
    expected = list(reference(prompt, weights.base))
    assert cleared, "vLLM's own cache was not cleared, so a hit would prove nothing"
    assert [first, again] == [[0, expected], [CACHED, expected]]
    assert second == [0, list(reference(other, weights.base))]
    assert log.count("EPOCHKV_ATTACH joins this engine to pool policy, L1 of 64 MiB") == 1
