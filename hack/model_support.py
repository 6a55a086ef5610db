"""`python -m hack.model_support [--check]`: write the page of model families, or fail when it differs.

Its rows are what `tests/engine/test_families.py` asserts on real engines, and what other tests assert of families that no engine on
CPUs runs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from hack.generated import ROOT, keep
from tests.engine.families import FAMILIES, Family
from tests.engine.families_elsewhere import ELSEWHERE, Elsewhere

TEXT: Final = """# Models

Generated from the tests by `python -m hack.model_support`; do not edit.

EpochKV restores what vLLM caches by prefix. The kind of a layer says which blocks a hit needs: all of them (full attention), those of the
last window or chunk, or the one block of a recurrent state. Nothing has to be set for any of them.

An engine whose tiers cannot be used serves without them. It says why in its log, in `epochkv status`, in the condition
[`TiersUsable`](conditions.md) and in the metric [`epochkv_pool_tiers_off_engines`](metrics.md).

## Run on real engines

`make test-all` runs each row on vLLM's CPU engines with a tiny random model; `make test` runs the rows with a star. Answers equal
those of an engine without any cache, in their tokens and logprobs. Prompts are computed in chunks. Before an engine reads a tier, all of
its own blocks are overwritten. Wrong numbers in the blocks of any one group change the answer.

- **GPU**, **L1**, **L2**: tokens that are found of a prompt. Of L2, an engine finds them that never computed the prompt.
- **Fork**: tokens that another engine finds in L2 of a prompt that shares the first `of` tokens with the stored one.
- **Again**: tokens that L1 holds there once vLLM has seen two prompts part. Windows and states are kept at the end of a prompt and where
  prompts part; `--prefix-cache-retention-interval` makes vLLM keep more.
- **Preempted**: the row also runs more requests than fit into the GPU's blocks. Empty: not tried.

| layers | models | run as | tokens of a block | GPU | L1 | L2 | fork | again | preempted |
|---|---|---|---|---|---|---|---|---|---|
{families}
{refused}
Rows with Mamba-2 run with one function of vLLM turned off. These layers promise states from inside of a chunk, and vLLM 0.32's kernel for
CPUs does not return them. Such an engine ends with an `IndexError` at its first long prompt, with or without EpochKV. vLLM's kernels for
GPUs do (read, not run). `tests/scheduler/test_states.py` has these states, on vLLM's scheduler.

## Experts over several ranks

| shape | GPU cache and L1 | L2 and other engines |
|---|---|---|
| dense models with data parallelism; experts inside of one data-parallel rank | named by weights | shared |
| experts over data-parallel ranks ([wide models](../wide.md)) | named by what all ranks hold | shared, by every rank with every rank |
| the same with expert rebalancing (`enable_eplb`), which elastic expert parallelism needs | the engine's own (`OwnCache`) | nothing |
| the same with `--enable-fault-tolerance` | the engine does not start | |
| the same under `EPOCHKV_FENCE`, or with a rank that runs without EpochKV | the engine's own (`OwnCache`) | nothing |
| the prefetch offloader, vLLM's old Ray executor, fp8 scales that an encoder makes as it runs | the engine's own (`OwnCache`) | nothing |
| weights that a kernel keeps where nobody sees them | the engine's own (`OwnCache`); on wide models none | nothing |

`EPOCHKV_ATTACH` adds the connector, so its rows are those without `EPOCHKV_FENCE`. Caches of an engine's own hit as vLLM's do
(`tests/scheduler/test_own_cache.py`). On wide models, and beside expert rebalancing, the prefetch offloader or the old Ray executor,
requests with an adapter hit in the GPU cache alone. As in vLLM, files that change at an adapter's path are not seen there before the
adapter is loaded again.

## Held by other tests

No engine on CPUs runs these layers, or their tiers are off. The tests have vLLM's own descriptions of the layers, or bytes of such layers.

| layers | models | what a hit needs | test |
|---|---|---|---|
{elsewhere}"""


def row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def family_row(family: Family) -> str:
    """What the engines of this family find."""
    architecture = family.config["architectures"][0]
    run_as = f"`{architecture}`{' *' if family.sliced else ''}"
    blocks = ", ".join(dict.fromkeys(str(tokens) for _, tokens in family.groups))
    if family.refused:
        return row((family.kind, family.models, run_as, blocks, "0", "off", "off", "", "", ""))
    hit = f"{family.hit} of {family.tokens}"
    fork, again = f"{family.shared} of {family.fork}", f"{family.junction} of {family.fork}"
    return row((family.kind, family.models, run_as, blocks, hit, hit, hit, fork, again, "yes" if family.crowd else ""))


def refused_line(family: Family) -> str:
    """Why its tiers are off, and what would help."""
    return f"`{family.config['architectures'][0]}` is off here: {family.refused}. {family.remedy}\n"


def elsewhere_row(entry: Elsewhere) -> str:
    """Raises LookupError where no such test is."""
    file, function = entry.test
    if f"def {function}(" not in (ROOT / file).read_text(encoding="utf-8"):
        raise LookupError(f"{file} has no test {function}, which the table of model families names")
    return row((entry.kind, entry.models, entry.treated, f"`{Path(file).name}`"))


def markdown() -> str:
    """The whole page."""
    return TEXT.format(
        families="".join(map(family_row, FAMILIES)),
        refused="".join(refused_line(family) for family in FAMILIES if family.refused),
        elsewhere="".join(map(elsewhere_row, ELSEWHERE)),
    )


def main() -> int:
    return keep("hack.model_support", __doc__, {Path("docs/reference/models.md"): markdown()})


if __name__ == "__main__":
    sys.exit(main())
