"""Tensors that are copied whole to memory that outlives a process, beside the last copy, which counts meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, final

import msgspec
import torch

from paceline.errors import ProtocolBug
from paceline.update.placement import as_tensor

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.transport.lasting_memory import LastingMemory

_LENGTH_BYTES: Final = 8  # of the list of tensors, which follows it
_ALIGNMENT: Final = 64

_Entry = tuple[str, str, tuple[int, ...]]  # name, dtype and shape
_decoder: Final = msgspec.msgpack.Decoder(tuple[_Entry, ...])


@final
class SavedTensors:
    """Two copies of named tensors, whose names and shapes may change from copy to copy.

    Copies are numbered, and a new one is written over the one before the last. So the copy of the number that was
    noted last, elsewhere and at once, is whole, wherever this process ends.

    Args:
        lasting: where they lie.
        name: of their memory.

    Example:
        >>> from paceline.transport.lasting_memory import LastingMemory, MemoryHolder
        >>> with MemoryHolder() as holder:
        ...     holder.start()
        ...     saved = SavedTensors(LastingMemory.connect(holder.theirs), "saved")
        ...     saved.write(1, {"step": torch.tensor(2.0), "sum": torch.ones(1, 2)})
        ...     saved.read(1)
        {'step': tensor(2.), 'sum': tensor([[1., 1.]])}
    """

    def __init__(self, lasting: LastingMemory, name: str) -> None:
        self._lasting, self._name = lasting, name

    def write(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        """Write a copy, one number after the other.

        Raises:
            OSError: there is no memory for it.
            ProtocolBug: one of them is no plain tensor of main memory.
        """
        entries = tuple(_entry(name, tensor) for name, tensor in tensors.items())
        encoded = msgspec.msgpack.encode(entries)
        start, starts = _padded(_LENGTH_BYTES + len(encoded)), list[int]()
        for tensor in tensors.values():
            starts.append(start)
            start += _padded(tensor.nbytes)
        memory = self._room(number, start)
        memory[:_LENGTH_BYTES] = len(encoded).to_bytes(_LENGTH_BYTES, "little")
        memory[_LENGTH_BYTES : _LENGTH_BYTES + len(encoded)] = encoded
        for begin, tensor in zip(starts, tensors.values(), strict=True):
            if tensor.nbytes:
                as_tensor(memory[begin : begin + tensor.nbytes], tensor.dtype).view(tensor.shape).copy_(tensor.detach())

    def read(self, number: int) -> dict[str, Tensor]:
        """Return the tensors of a copy, which lie where they were written: copy them before the next but one."""
        memory, found = self._lasting.region(self._region(number), 0), dict[str, torch.Tensor]()
        length = int.from_bytes(memory[:_LENGTH_BYTES], "little")
        start = _padded(_LENGTH_BYTES + length)
        for name, dtype_name, shape in _decoder.decode(memory[_LENGTH_BYTES : _LENGTH_BYTES + length]):
            empty = torch.empty(shape, dtype=getattr(torch, dtype_name), device="meta")
            if empty.nbytes:
                found[name] = as_tensor(memory[start : start + empty.nbytes], empty.dtype).view(shape)
            else:
                found[name] = torch.empty(shape, dtype=empty.dtype)
            start += _padded(empty.nbytes)
        return found

    def _room(self, number: int, size_bytes: int) -> memoryview:
        name = self._region(number)
        if self._lasting.has(name) and self._lasting.region(name, size_bytes).nbytes < size_bytes:
            self._lasting.drop(name)
        return self._lasting.region(name, size_bytes)

    def _region(self, number: int) -> str:
        return f"{self._name}-{number % 2}"


def _entry(name: str, tensor: Tensor) -> _Entry:
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_quantized:
        raise ProtocolBug(f"'{name}' is on {tensor.device} and {tensor.layout}, expected a plain tensor of main memory")
    return name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
