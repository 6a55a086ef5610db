"""`EPOCHKV_ATTACH` alone joins the engine of a program that knows nothing of connectors. It has hits of L1, and stamps of its weights.

python -m tests.engine.test_attach JOB      (the program)
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hack.standalone.engine import CPU_ENVIRONMENT
from hack.standalone.pool import Pool
from hack.standalone.process import Process
from tests.engine.conftest import CACHED, Prompts, Reference, Weights
from tests.support.nursery import Nursery

pytestmark = pytest.mark.timeout(900)  # the first test starts two engines


def test_an_engine_joins_by_the_environment_alone(
    weights: Weights, tmp_path: Path, prompts: Prompts, reference: Reference, servers: Nursery
) -> None:
    prompt, other, job = prompts(), prompts(), tmp_path / "job.json"
    job.write_text(json.dumps([str(weights.base), prompt, other]))
    with Pool(tmp_path) as pool:
        attached = {"EPOCHKV_ATTACH": "1", "EPOCHKV_CONFIG": str(pool.credentials), "EPOCHKV_LOCAL_CAPACITY": "64Mi"}
        variables = {**CPU_ENVIRONMENT, **attached}
        command = [sys.executable, "-m", "tests.engine.test_attach", str(job)]
        with Process("program", command, tmp_path / "program.log", variables, popen=servers.popen) as program:
            pool.wait_engines(1, 240)
            (held,) = pool.snapshot().weights
            (tmp_path / "shares").touch()
            try:
                program.popen.wait(240)
            except subprocess.TimeoutExpired:
                pytest.fail(f"the program hangs:\n{program.tail(60)}")
    log = program.log.read_text()
    results = [line for line in log.splitlines() if line.startswith("RESULT ")]
    assert results, program.tail(60)
    cleared, first, second, again, stamped = json.loads(results[0].removeprefix("RESULT "))
    expected = list(reference(prompt, weights.base))
    assert cleared, "vLLM's own cache was not cleared, so a hit would prove nothing"
    assert [first, again] == [[0, expected], [CACHED, expected]]
    assert second == [0, list(reference(other, weights.base))]
    assert stamped == [{"gpu": 0, "l1": CACHED, "l2": 0}, held.weights.hex()]
    assert log.count("EPOCHKV_ATTACH joins this engine to pool policy, L1 of 64 MiB") == 1


def main() -> None:
    """As TRL and OpenRLHF: `LLM(...)` with a fixed list of arguments. It asks once the test has seen its engine share: what is computed
    before is not saved."""
    from vllm import LLM, SamplingParams

    from epochkv_fence.client.stamps import ASK, stamps

    model, prompt, other = json.loads(Path(sys.argv[1]).read_text())
    llm = LLM(model=model, skip_tokenizer_init=True, enforce_eager=True, dtype="float32", max_model_len=2048, max_num_seqs=4)

    def ask(tokens: list[int]) -> list[Any]:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
        output = llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)[0]
        return [output.num_cached_tokens, list(output.outputs[0].token_ids)]

    shares = Path(sys.argv[1]).with_name("shares")
    while not shares.exists():  # the test ends this process in time
        time.sleep(0.05)
    first = ask(prompt)
    cleared = llm.reset_prefix_cache()
    second, again = ask(other), ask(prompt)
    llm.reset_prefix_cache()
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False, extra_args={"kv_transfer_params": ASK})
    (stamp,) = stamps(llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0])
    assert stamp is not None
    print("RESULT " + json.dumps([cleared, first, second, again, [stamp.cached_tokens, stamp.weights]]), flush=True)


if __name__ == "__main__":
    main()
