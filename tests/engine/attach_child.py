"""A program that knows nothing of connectors, as TRL and OpenRLHF are: `LLM(...)` with a fixed list of arguments.

python -m tests.engine.attach_child JOB      (JOB: what `test_attach` wrote)

It asks once the test has seen its engine share: what is computed before is not saved.
"""

import json
import sys
import time
from pathlib import Path

from vllm import LLM, SamplingParams


def main() -> None:
    model, prompt, other = json.loads(Path(sys.argv[1]).read_text())
    llm = LLM(model=model, skip_tokenizer_init=True, enforce_eager=True, dtype="float32", max_model_len=2048, max_num_seqs=4)

    def ask(tokens):
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
        output = llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)[0]
        return [output.num_cached_tokens, list(output.outputs[0].token_ids)]

    shares = Path(sys.argv[1]).with_name("shares")
    while not shares.exists():  # the test ends this process in time
        time.sleep(0.05)
    first = ask(prompt)
    cleared = llm.reset_prefix_cache()
    print("RESULT " + json.dumps([cleared, first, ask(other), ask(prompt)]), flush=True)


if __name__ == "__main__":
    main()
