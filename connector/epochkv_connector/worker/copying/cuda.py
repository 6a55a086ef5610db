"""What copies need of CUDA: a stream of their own, and the runtime's calls by their C names.

Those are page-locking, copies in batches, and the error that the runtime remembers. torch has no call for the latter two.
Its own page-locking leaves the error of a refusal in the thread, where the model's next kernel launch would raise it.
Depends on torch only.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

NOT_SUPPORTED = (36, 801)
"""CUDA errors of a driver that is older than its runtime, or of a device that cannot."""

Submit = Callable[[Tensor, Tensor, Tensor, int], None]
"""(target addresses, source addresses, sizes, stream): issue the copies. Raises RuntimeError when the driver refuses; some
of them may have been issued by then."""


class UnsupportedDevice(RuntimeError):
    """The KV tensors are on a device that has no copies here."""


def check_device(device: torch.device, hip: str | None = torch.version.hip) -> None:
    """Raise UnsupportedDevice for what is neither host memory nor an NVIDIA GPU. torch calls the GPUs of ROCm `cuda`, too."""
    if device.type == "cuda" and hip is not None:
        name = f"ROCm (HIP {hip})"
    elif device.type not in ("cpu", "cuda"):
        name = f"a device of type {device.type!r}"
    else:
        return
    raise UnsupportedDevice(
        f"the KV cache is on {name}; EpochKV copies KV on NVIDIA GPUs and on CPUs only, so this engine keeps none outside its own "
        "cache; take EpochKV's connector out of --kv-transfer-config here"
    )


@functools.cache
def runtime() -> Any:
    """The CUDA runtime that torch has loaded. Raises RuntimeError where it cannot be opened."""
    name = f"libcudart.so.{_major()}"
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise RuntimeError(f"the CUDA runtime cannot be opened ({error}); torch was built for CUDA {torch.version.cuda}") from error


def page_lock(address: int, num_bytes: int, library: Any = None) -> None:
    """Page-lock exactly these bytes (torch's own pinned allocator rounds up to a power of two). Raises RuntimeError.

    The runtime remembers no error of a refusal.
    """
    library = library if library is not None else runtime()
    code = library.cudaHostRegister(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_uint(0))
    if code != 0:
        library.cudaGetLastError()
        raise RuntimeError(f"cudaHostRegister returned CUDA error {code}")


def page_unlock(address: int) -> None:
    """Give page-locked memory back to the driver. Never raises: a caller could do nothing about it."""
    if runtime().cudaHostUnregister(ctypes.c_void_p(address)) != 0:
        runtime().cudaGetLastError()


def batch_copy(library: Any = None) -> Submit:
    """The fastest way that this CUDA runtime (default: the one that torch has loaded) has: one call for all, or one for each row."""
    library = library if library is not None else runtime()
    single = library.cudaMemcpyAsync
    single.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]

    def one_by_one(to: Tensor, source: Tensor, sizes: Tensor, stream: int) -> None:
        for target, origin, size in zip(to.tolist(), source.tolist(), sizes.tolist(), strict=True):
            check("cudaMemcpyAsync", single(target, origin, size, 4, stream))  # 4: the direction follows from the addresses

    def check(name: str, code: int) -> None:
        if code != 0:
            library.cudaGetLastError()
            raise RuntimeError(f"{name} returned CUDA error {code}")

    batch = getattr(library, "cudaMemcpyBatchAsync", None)
    if batch is None:
        logger.info("this CUDA runtime (%s) has no batched copy (12.8 brought it); blocks are copied row by row", torch.version.cuda)
        return one_by_one
    # cudaMemcpyAttributes: its first field says that sources are read in stream order; the rest, whatever its size, is 0.
    attributes = (ctypes.c_int * 16)(1)
    start, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
    refused: list[int] = []

    def all_at_once(to: Tensor, source: Tensor, sizes: Tensor, stream: int) -> None:
        arrays = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (to, source, sizes)]
        last = [ctypes.byref(failed)] if _major() < 13 else []  # 13 dropped the index of the failure
        count = ctypes.c_size_t(to.numel())
        attrs = (ctypes.byref(attributes), ctypes.byref(start), ctypes.c_size_t(1))
        code = 0 if refused else batch(*arrays, count, *attrs, *last, ctypes.c_void_p(stream))
        if code in NOT_SUPPORTED:
            library.cudaGetLastError()
            refused.append(code)
            logger.warning("this driver refuses batched copies (CUDA error %d); blocks are copied row by row", code)
            code = 0
        check("cudaMemcpyBatchAsync", code)
        if refused:
            one_by_one(to, source, sizes, stream)

    return all_at_once


class SideStream:
    """A stream beside the model's, where the copies of one thread are issued in order."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream(device=device)

    @property
    def handle(self) -> int:
        """`cudaStream_t`."""
        handle: int = self._stream.cuda_stream
        return handle

    def behind(self, after: Any) -> None:
        """What is issued from now on begins when `after` has come (None: at once). Makes the stream's device the thread's."""
        torch.cuda.set_device(self._device)
        if after is not None:
            self._stream.wait_event(after)

    def wait(self) -> None:
        """Sleep until everything issued so far has ended."""
        done = torch.cuda.Event(blocking=True)
        done.record(self._stream)
        done.synchronize()

    def idle(self) -> bool:
        """Whether nothing issued so far is under way. A device that answers with an error does nothing any more."""
        try:
            return bool(self._stream.query())
        except RuntimeError:
            return True


def _major() -> int:
    return int((torch.version.cuda or "0").split(".")[0])
