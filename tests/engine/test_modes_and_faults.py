"""L2 alone, an engine in one process, and everything that may be missing or wrong when an engine starts.

`test_engine_core_in_process` and the one with a mistyped key start vLLM as a user does; the others fork it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from hack.loopback import free_port
from hack.standalone.engine import CPU_ENVIRONMENT, Engine
from hack.standalone.mooncake import Mooncake
from hack.standalone.pool import Pool
from hack.standalone.process import Process, ProcessError
from hack.waiting import eventually
from tests.engine.conftest import BLOCKS, CACHED, PATIENT, PATIENT_ENVIRON, Prompts, Reference, Weights, check, settled_keys
from tests.engine.server_nursery import ServerNursery


@pytest.fixture(scope="module")
def pool(folder: Path) -> Iterator[Pool]:
    with Pool(folder) as pool:  # no test here loses a lease: a short one is lost whenever the machine stands still
        yield pool


def test_l2_only_and_a_master_that_comes_later(
    weights: Weights, folder: Path, pool: Pool, servers: ServerNursery, prompts: Prompts, reference: Reference
) -> None:
    prompt = prompts()
    mooncake = Mooncake(folder / "late")
    connector = pool.connector(master_address=mooncake.address, staging_slots=8, **PATIENT)  # a load gets one: 7 pieces
    with Engine("l2", weights.base, folder, connector, environ=PATIENT_ENVIRON, popen=servers.popen) as engine:
        pool.wait_engines(1)
        answer = engine.complete(prompt)
        check(answer, 0, reference(prompt, weights.base))
        with mooncake:
            eventually(lambda: _stored(engine, mooncake, prompts()), "the engine joins the store", 60.0)
            before = settled_keys(mooncake)
            prompt = prompts()
            assert engine.complete(prompt).tokens == reference(prompt, weights.base)
            eventually(lambda: len(set(mooncake.keys()) - before) == BLOCKS, "blocks in the store")
            assert engine.reset_prefix_cache(external=False)
            answer = engine.complete(prompt)
            check(answer, CACHED, reference(prompt, weights.base))
            assert mooncake.master
            mooncake.master.end(1.0)
            assert not mooncake.master.alive()
            assert engine.reset_prefix_cache(external=False)
            assert engine.complete(prompt).tokens == reference(prompt, weights.base), "a dead master changed an answer"
        assert [view.alive for view in pool.snapshot().engines] == [True]
    assert pool.snapshot().engines == [], "an engine that ends says so: nobody waits for its lease"


def _stored(engine: Engine, mooncake: Mooncake, prompt: list[int]) -> bool:
    engine.complete(prompt, 1)
    return bool(mooncake.keys())


def test_broken_hub_address_and_key(
    weights: Weights, folder: Path, pool: Pool, servers: ServerNursery, prompts: Prompts, reference: Reference
) -> None:
    connector = pool.connector(local_bytes=64 << 20)
    wrong = folder / "wrong-fence"
    wrong.mkdir()
    for file in pool.credentials.iterdir():
        (wrong / file.name).write_text(file.read_text())
    (wrong / "client.key").write_text("this is not a CURVE key")
    connector["kv_connector_extra_config"]["hub"] = {"endpoint": f"tcp://127.0.0.1:{free_port()}", "credentials_dir": str(wrong)}
    prompt = prompts()
    with Engine("no-hub", weights.base, folder, connector, popen=servers.popen) as engine:
        for _ in range(3):
            answer = engine.complete(prompt)
            check(answer, 0, reference(prompt, weights.base))
        assert engine.metric("vllm:external_prefix_cache_hits_total") == 0
        log = engine.process.log.read_text()
        complaints = [line for line in log.splitlines() if "client.key" in line]
        assert complaints, log[-3000:]
        assert len([line for line in complaints if "EngineCore" in line or "Worker" not in line]) == 1, complaints


@pytest.mark.slow
def test_unknown_configuration_key_is_one_clear_error(weights: Weights, folder: Path, pool: Pool) -> None:
    connector = pool.connector(local_bytes=64 << 20, capasity=1)
    engine = Engine("typo", weights.base, folder, connector)
    try:
        with pytest.raises(ProcessError, match="ended with status"):
            engine.wait_ready()
        assert "capasity" in engine.process.log.read_text()
    finally:
        engine.end()


IN_PROCESS = """
    import json, os, sys, time
    from vllm import LLM, SamplingParams
    model, connector, prompt = json.load(open(sys.argv[1]))
    llm = LLM(model=model, skip_tokenizer_init=True, enforce_eager=True, dtype="float32", max_model_len=2048, enable_prefix_caching=True,
              kv_transfer_config=connector)
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    def ask():
        output = llm.generate([{"prompt_token_ids": prompt}], greedy, use_tqdm=False)[0]
        return [output.num_cached_tokens, list(output.outputs[0].token_ids)]
    while not os.path.exists(sys.argv[2]):
        time.sleep(0.1)
    first = ask()
    time.sleep(1)
    reset = llm.reset_prefix_cache()
    print("RESULT " + json.dumps([first, reset, ask()]), flush=True)
"""


@pytest.mark.slow
def test_engine_core_in_process(weights: Weights, folder: Path, mooncake: Mooncake, prompts: Prompts, reference: Reference) -> None:
    prompt = prompts()
    job, go, script = folder / "job.json", folder / "go", folder / "in_process.py"
    script.write_text(textwrap.dedent(IN_PROCESS))
    environ = {**CPU_ENVIRONMENT, **PATIENT_ENVIRON, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with Pool(folder / "in-process") as pool:
        connector = pool.connector(local_bytes=64 << 20, master_address=mooncake.address, **PATIENT)
        job.write_text(json.dumps([str(weights.base), connector, prompt]))
        with Process("in-process engine", [sys.executable, str(script), str(job), str(go)], folder / "in_process.log", environ) as process:
            pool.wait_engines(1, 240)
            go.touch()
            try:
                process.popen.wait(60)
            except subprocess.TimeoutExpired:
                pytest.fail(f"the in-process engine hangs:\n{process.tail(60)}")
    results = [line for line in process.log.read_text().splitlines() if line.startswith("RESULT ")]
    assert results, process.tail(60)
    (cold, reset, warm) = json.loads(results[0].removeprefix("RESULT "))
    expected = list(reference(prompt, weights.base))
    assert cold == [0, expected]
    assert reset is True, "a pinned save kept the GPU prefix cache from being reset"
    assert warm == [CACHED, expected]
