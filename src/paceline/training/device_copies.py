"""Asynchronous copies between CUDA devices and host memory, overlapped with what the devices compute.

A device does what is queued on one stream in order, and what is on another whenever it likes, unless that waits. What
a script computes is queued on the current stream; the host goes on meanwhile.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from mmap import PAGESIZE
from typing import Any, cast

import torch
from torch import Tensor

_PORTABLE = 1  # cudaHostRegisterPortable: locked for all devices


def _tell(text: str) -> None:
    sys.stderr.write(f"paceline: {text}\n")


@dataclass(slots=True)
class DeviceCopies:
    """Carries gradients from devices to the host, and values back. Without devices it never touches `torch.cuda`.

    Only what lies in locked memory is copied while the host goes on; any other copy is over when its call returns.

    Args:
        sides: a stream for the copies from each device.
        notice: is told why memory cannot be locked, once.
    """

    sides: Mapping[torch.device, torch.cuda.Stream] = field(default_factory=dict[torch.device, torch.cuda.Stream])
    notice: Callable[[str], object] = _tell
    _refused: bool = False  # whether memory could not be locked

    @staticmethod
    def serving(tensors: Iterable[Tensor]) -> DeviceCopies:
        """Return a courier for the devices that these tensors are on."""
        devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
        return DeviceCopies({device: torch.cuda.Stream(device) for device in devices})

    def serves(self, tensor: Tensor) -> bool:
        """Say whether a tensor is on a device that this goes to."""
        return tensor.device in self.sides

    def can_hide(self, out: Tensor) -> bool:
        """Say whether `fetch` into this memory of the host returns before the copy is done."""
        return out.is_pinned()

    def fetch(self, source: Tensor, out: Tensor) -> torch.cuda.Event:
        """Begin to copy a tensor of a device into memory of the host; what is returned tells when that is done.

        A later copy to the same place ends later. Does not block where `can_hide` says so.
        """
        side = self.sides[source.device]
        # Nothing else puts the copy behind what computes the source, which is queued but need not have begun.
        side.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(side):
            out.copy_(source, non_blocking=out.is_pinned() and source.dtype == out.dtype)
        # Should the script drop the source, its memory would be used again by the stream on which it was made, which
        # does not wait for this one.
        source.record_stream(side)
        return _mark(side)

    def deliver(self, source: Tensor, out: Tensor) -> None:
        """Copy memory of the host to a tensor of a device; it must not change before what `queued` returns is over.

        The copy takes its place on the current stream: what was queued before reads the old values, what is queued
        from now on the new ones. A stream of its own would have to wait for the former, and the latter for it.
        """
        out.copy_(source, non_blocking=source.is_pinned() and source.dtype == out.dtype)

    def queued(self) -> list[torch.cuda.Event]:
        """Return what tells, for each device, when all is done that is queued on its current stream now."""
        return [_mark(torch.cuda.current_stream(device)) for device in self.sides]

    def lock(self, owner: object, memory: Tensor) -> None:
        """Lock memory of this process's own in its place (page-lock, pin) until `owner` is gone.

        Never for memory that is mapped from another process: to lock it would give this process pages of its own.
        """
        # Pages are locked, not bytes. What does not begin with one is small and lies beside other things.
        if not self.sides or self._refused or memory.data_ptr() % PAGESIZE or memory.is_pinned():
            return
        code = int(cast("Any", torch.cuda.cudart()).cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE))
        if code == 0:
            # What a finalizer is called with lives until then: the memory goes after it is unlocked. At exit the
            # driver may be gone before, and sees to it itself.
            weakref.finalize(owner, _unlock, memory, tuple(self.sides)).atexit = False
            return
        self._refused = True
        _clear_error(next(iter(self.sides)))
        self.notice(
            f"{memory.nbytes} bytes of memory cannot be locked for the GPU (CUDA error {code}): copies from and to it "
            "are slower and nothing runs beside them. Give the job more memory, or a higher limit of locked memory."
        )


def _mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Return an event that happens when a stream has done all that is queued on it now."""
    event = torch.cuda.Event(blocking=True)  # who waits for it sleeps: servers may need the core
    event.record(stream)
    return event


def _unlock(memory: Tensor, devices: tuple[torch.device, ...]) -> None:
    """Let memory be moved again, once no device can still be copying it."""
    for device in devices:
        torch.cuda.synchronize(device)
    if int(cast("Any", torch.cuda.cudart()).cudaHostUnregister(memory.data_ptr())) != 0:
        _clear_error(devices[0])


def _clear_error(device: torch.device) -> None:
    """Have the runtime tell of an error that has been dealt with: else the next kernel of the script would do it."""
    with suppress(RuntimeError):
        torch.ones(1, device=device).add_(1)
