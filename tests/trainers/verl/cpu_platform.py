"""A CPU as verl's accelerator, by verl's own plug-in: without one, verl takes a machine that has no accelerator for an NVIDIA one.

`VERL_USE_EXTERNAL_MODULES` names this module, and `VERL_PLATFORM=cpu` chooses it. Ray is told of GPUs that do not exist, because
verl places its workers by them. Tensors cannot be shared as on a GPU, so weights travel through verl's shared memory.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


def _nothing(*_: object, **__: object) -> None:
    """A CPU has done its work when the call returns, and caches no memory."""


DEVICE: Any = SimpleNamespace(
    synchronize=_nothing,
    empty_cache=_nothing,
    set_device=_nothing,
    is_available=lambda: True,
    device_count=lambda: 1,
    current_device=lambda: 0,
)
"""What verl asks of `torch.cuda`."""


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """One device, which is always there."""

    device_name = "cpu"
    vendor_name = "cpu"

    @property
    def device_module(self) -> ModuleType:
        return DEVICE

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None
