"""A plugin of vLLM for tests and benchmarks: what its CPU back end lacks for experts over data-parallel ranks, over gloo.

`all_gatherv` and `reduce_scatterv` exchange rows of unlike numbers. Ranks pad to the longest, and cut off again.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # tests of pods install it where torch is not
    import torch


def install(folder: Path) -> dict[str, str]:
    """Make `folder` a place where vLLM finds this plugin; returns the environment of engines that are to have it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cpu_collectives.py").write_text(Path(__file__).read_text())
    about = folder / "cpu_collectives-1.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: cpu-collectives\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[vllm.general_plugins]\ncpu_collectives = cpu_collectives:register\n")
    return {"PYTHONPATH": ":".join([str(folder), *(path for path in sys.path if path)])}


def register() -> None:
    """Called by vLLM in every process of an engine."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    communicator: Any = CpuCommunicator
    communicator.all_gatherv, communicator.reduce_scatterv = all_gatherv, reduce_scatterv


def all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """Rows of all ranks, one rank's after the other's."""
    import torch
    import torch.distributed as dist

    assert dim == 0
    if isinstance(input_, list | tuple):
        return [all_gatherv(self, one, dim, sizes) for one in input_]
    counts = sizes or [input_.shape[0]] * self.world_size
    own = torch.zeros((max(counts), *input_.shape[1:]), dtype=input_.dtype)
    own[: input_.shape[0]] = input_
    gathered = [torch.empty_like(own) for _ in counts]
    dist.all_gather(gathered, own, group=self.device_group)
    return torch.cat([rows[:count] for rows, count in zip(gathered, counts, strict=True)])


def reduce_scatterv(self: Any, input_: torch.Tensor, dim: int = 0, sizes: list[int] | None = None) -> torch.Tensor:
    """The sum over all ranks, of which each gets its own rows."""
    import torch.distributed as dist

    assert dim == 0
    total = input_.contiguous().clone()
    dist.all_reduce(total, group=self.device_group)
    counts = sizes or [input_.shape[0] // self.world_size] * self.world_size
    first = sum(counts[: self.rank_in_group])
    return total[first : first + counts[self.rank_in_group]].contiguous()
