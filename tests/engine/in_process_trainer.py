"""A program with its engine in its own process, which calls `load_weights` of the model between requests, and while they run.

python in_process_trainer.py JOB GO     (JOB: what `test_names` wrote; begins when the file GO exists)
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from safetensors.torch import load_file
from vllm import LLM, SamplingParams

model, half, connector, known, openings, name, (opening, block) = json.loads(Path(sys.argv[1]).read_text())
llm = LLM(
    model=model,
    skip_tokenizer_init=True,
    enforce_eager=True,
    dtype="float32",
    max_model_len=2048,
    max_num_seqs=8,
    enable_prefix_caching=True,
    kv_transfer_config=connector,
)
engine = llm.llm_engine
loads = engine.model_executor.driver_worker.worker.get_model().load_weights


def load(folder):
    loads([(name, load_file(Path(folder) / "model.safetensors")[name])])


def params(tokens):
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)


def ask(prompt):
    output = llm.generate([{"prompt_token_ids": prompt}], params(8), use_tqdm=False)[0]
    return [output.num_cached_tokens, list(output.outputs[0].token_ids)]


def run():
    """Requests during which the weights change there and back; their tokens, prompts included."""
    for index, tokens in enumerate(openings):
        engine.add_request(f"{index} {time.monotonic()}", {"prompt_token_ids": tokens}, params(300))
    steps, wholes = 0, []
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                wholes.append(list(output.prompt_token_ids) + list(output.outputs[0].token_ids))
        steps += 1
        if steps in (40, 200):
            load(half if steps == 40 else model)
    return wholes


while not Path(sys.argv[2]).exists():
    time.sleep(0.1)
first = ask(known)
load(half)
other = ask(known)
load(model)
again = ask(known)
asked = [whole[:end] for whole in run() for end in range(opening, len(whole) + 1, block)]
print("RESULT " + json.dumps([first, other, again, asked, [ask(prompt) for prompt in asked]]), flush=True)
time.sleep(2)
