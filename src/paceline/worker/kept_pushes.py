"""Copies of dense pushes that replicas of servers may lack: upstream backup.

A gradient lies in memory that the next backward writes, so what may have to be said again is copied while it is sent.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

import torch

from paceline.core.messages import PushId
from paceline.transport.buffers import fresh_buffer
from paceline.wire.messages import PushFrame


@final
@dataclass(slots=True)
class KeptPush:
    """One push, and by server its parts that a replica may lack."""

    frame: PushFrame
    memory: memoryview
    parts: dict[int, memoryview]


@final
@dataclass(slots=True)
class KeptPushes:
    """The pushes of one dense table that servers have, and replicas may not. Used under the lock of the worker.

    Memory is used again: a fresh copy would take longer than the copying.

    Example:
        >>> from paceline.core.messages import Push
        >>> kept, gradient = KeptPushes(), memoryview(bytearray(b"gradient"))
        >>> push = Push(PushId(1, 0, 0, 0), "w", 0, 0)
        >>> kept.keep(PushFrame(push, 1.0, (), ()), gradient, {0: slice(0, 4), 1: slice(4, 8)})
        >>> gradient[:] = bytes(8)
        >>> frame, body = kept.part(1, push.id)
        >>> bytes(body)
        b'ient'
        >>> kept.drop(0, push.id), kept.drop(1, push.id), len(kept)
        (None, None, 0)
    """

    _pushes: dict[PushId, KeptPush] = field(default_factory=dict[PushId, KeptPush])
    _free: list[memoryview] = field(default_factory=list[memoryview])

    def __len__(self) -> int:
        """Count the pushes."""
        return len(self._pushes)

    def keep(self, frame: PushFrame, memory: memoryview, parts: dict[int, slice]) -> None:
        """Copy a push; each server has a part of its memory, in bytes."""
        copy = self._free.pop() if self._free else fresh_buffer(memory.nbytes)
        if memory.nbytes:  # by several threads, where it is large
            torch.frombuffer(copy, dtype=torch.uint8).copy_(torch.frombuffer(memory, dtype=torch.uint8))
        self._pushes[frame.push.id] = KeptPush(frame, copy, {server: copy[part] for server, part in parts.items()})

    def part(self, server: int, push_id: PushId) -> tuple[PushFrame, memoryview] | None:
        """Return a server's part of a push; None if it is not kept."""
        push = self._pushes.get(push_id)
        return None if push is None or server not in push.parts else (push.frame, push.parts[server])

    def drop(self, server: int, push_id: PushId) -> None:
        """Forget a server's part of a push, if it is kept."""
        push = self._pushes.get(push_id)
        if push is None:
            return
        push.parts.pop(server, None)
        if not push.parts:
            del self._pushes[push_id]
            self._free.append(push.memory)

    def clear(self) -> None:
        """Forget all."""
        self._pushes.clear()
        self._free.clear()
