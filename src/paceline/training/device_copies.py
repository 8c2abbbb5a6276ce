"""Asynchronous copies between CUDA devices and host memory, overlapped with what the devices compute.

A device does what is queued on one stream in order, and what is on another whenever it likes, unless that waits. What
a script computes is queued on the current stream; the host goes on meanwhile.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from mmap import PAGESIZE
from typing import Any, cast

import torch
from torch import Tensor

from paceline.notices import tell

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices


@dataclass(slots=True)
class DeviceCopies:
    """Copies gradients from devices to the host, and values back. Without devices it never touches `torch.cuda`.

    Only copies from and to pinned memory run in the background; any other copy is complete when its call returns.

    Args:
        sides: a stream for the copies from each device.
        notice: receives the reason why memory cannot be pinned, once.
    """

    sides: Mapping[torch.device, torch.cuda.Stream] = field(default_factory=dict[torch.device, torch.cuda.Stream])
    notice: Callable[[str], object] = tell
    _refused: bool = False  # whether pinning memory has failed

    @staticmethod
    def serving(tensors: Iterable[Tensor]) -> DeviceCopies:
        """Return the copies for the devices that these tensors are on."""
        devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
        return DeviceCopies({device: torch.cuda.Stream(device) for device in devices})

    def serves(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on one of these devices."""
        return tensor.device in self.sides

    def can_hide(self, out: Tensor) -> bool:
        """Return whether `fetch` into this host memory returns before the copy is complete."""
        return out.is_pinned()

    def fetch(self, source: Tensor, out: Tensor) -> torch.cuda.Event:
        """Start to copy a tensor from a device to host memory; return the event of its completion.

        Copies to the same place complete in order. Does not block where `can_hide` returns True.
        """
        side = self.sides[source.device]
        # The side stream must wait for the computation of the source, which is queued but may not have started.
        side.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(side):
            out.copy_(source, non_blocking=out.is_pinned() and source.dtype == out.dtype)
        # If the script drops the source, its memory is reused by the stream on which it was made, which does not wait
        # for this one.
        source.record_stream(side)
        return _mark(side)

    def deliver(self, source: Tensor, out: Tensor) -> None:
        """Copy host memory to a tensor of a device; it must not change before the events of `queued` have happened.

        The copy is queued on the current stream: earlier operations read the old values, later ones the new. A side
        stream would have to wait for the former, and the latter for it.
        """
        out.copy_(source, non_blocking=source.is_pinned() and source.dtype == out.dtype)

    def queued(self) -> list[torch.cuda.Event]:
        """Return for each device the event of completion of all that is queued on its current stream."""
        return [_mark(torch.cuda.current_stream(device)) for device in self.sides]

    def lock(self, owner: object, memory: Tensor) -> None:
        """Pin (page-lock) private memory in place until `owner` is gone.

        Not for memory that is mapped from another process: pinning it would give this process private pages.
        """
        # Whole pages are pinned. A buffer that does not start on a page is small, and shares its page with other data.
        if not self.sides or self._refused or memory.data_ptr() % PAGESIZE or memory.is_pinned():
            return
        code = int(cast("Any", torch.cuda.cudart()).cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE))
        if code == 0:
            # A finalizer keeps its arguments alive, so the memory is freed after it is unpinned. At exit the driver may
            # be gone before, which unpins it itself.
            weakref.finalize(owner, _unlock, memory, tuple(self.sides)).atexit = False
            return
        self._refused = True
        _clear_error(next(iter(self.sides)))
        self.notice(
            f"{memory.nbytes} bytes of memory cannot be locked for the GPU (CUDA error {code}): copies from and to it "
            "are slower and nothing runs beside them. Give the job more memory, or a higher limit of locked memory."
        )


def _mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Return the event of completion of all that is queued on a stream."""
    event = torch.cuda.Event(blocking=True)  # waiting threads sleep, as servers may need the core
    event.record(stream)
    return event


def _unlock(memory: Tensor, devices: tuple[torch.device, ...]) -> None:
    """Unpin memory, once no device can still be copying it."""
    for device in devices:
        torch.cuda.synchronize(device)
    if int(cast("Any", torch.cuda.cudart()).cudaHostUnregister(memory.data_ptr())) != 0:
        _clear_error(devices[0])


def _clear_error(device: torch.device) -> None:
    """Clear a handled error in the CUDA runtime, which the next kernel of the script would report otherwise."""
    with suppress(RuntimeError):
        torch.ones(1, device=device).add_(1)
