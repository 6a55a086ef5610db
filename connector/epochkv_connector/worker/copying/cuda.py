"""Calls the CUDA runtime by its C names: page-locking, copies in batches, and the error that the runtime remembers.

torch has no call for the latter two. Its own page-locking leaves the error of a refusal in the thread, where the model's next
kernel launch would raise it. Depends on torch only.
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
    """Refuse what is neither host memory nor an NVIDIA GPU. torch calls the GPUs of ROCm `cuda`, too.

    Raises:
        UnsupportedDevice: names the platform.
    """
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
    """The CUDA runtime that torch has loaded.

    Raises:
        RuntimeError: it cannot be opened.
    """
    name = f"libcudart.so.{_major()}"
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise RuntimeError(f"the CUDA runtime cannot be opened ({error}); torch was built for CUDA {torch.version.cuda}") from error


def page_lock(address: int, num_bytes: int, library: Any = None) -> None:
    """Page-lock exactly these bytes (torch's own pinned allocator rounds up to a power of two).

    Raises:
        RuntimeError: refused; the runtime remembers no error of it.
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
    """The fastest way this CUDA runtime has: one call for all, or one call for each row.

    Args:
        library: the CUDA runtime; default: the one that torch has loaded.
    """
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


def _major() -> int:
    return int((torch.version.cuda or "0").split(".")[0])
