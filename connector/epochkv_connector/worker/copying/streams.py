"""The CUDA stream that copies of one thread run on."""

from __future__ import annotations

from typing import Any

import torch


class SideStream:
    """A stream beside the model's (`copies.Stream`). Used by one thread."""

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
        """See `copies.Stream`; makes the stream's device the thread's."""
        torch.cuda.set_device(self._device)
        if after is not None:
            self._stream.wait_event(after)

    def wait(self) -> None:
        """See `copies.Stream`: sleeps until an event behind the work has come."""
        done = torch.cuda.Event(blocking=True)
        done.record(self._stream)
        done.synchronize()

    def idle(self) -> bool:
        """See `copies.Stream`. A device that answers with an error does nothing any more."""
        try:
            return bool(self._stream.query())
        except RuntimeError:
            return True
