"""Tensors passed between pipeline stages, with their shape and type sent ahead."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.collective.signature import NUM_WORDS, CallSignature

Carry = Callable[[Tensor], object]  # sends a contiguous tensor, or receives into it


def send_tensors(tensors: Sequence[Tensor], carry: Carry) -> None:
    """Send tensors to another worker, each after its shape, its dtype and whether it requires a gradient."""
    for tensor in tensors:
        told = CallSignature.over(tensor, "forward")
        carry(_numbered(told, len(tensors), tensor.requires_grad).words())
        if tensor.numel():
            carry(_bytes(tensor.detach().contiguous()))


def receive_tensors(carry: Carry) -> tuple[Tensor, ...]:
    """Receive the tensors that another worker sends."""
    found: list[Tensor] = []
    while True:
        words = torch.zeros(NUM_WORDS, dtype=torch.int64)
        carry(words)
        told = CallSignature.read(words)
        tensor = torch.empty(told.shape, dtype=told.dtype)
        if tensor.numel():
            carry(_bytes(tensor))
        found.append(tensor.requires_grad_(bool(told.weight)))
        if len(found) == told.number:
            return tuple(found)


def letters_of(text: str) -> Tensor:
    """Return a text as a tensor, to be sent with others.

    >>> text_of(letters_of("0.weight"))
    '0.weight'
    """
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def text_of(letters: Tensor) -> str:
    """Return the text in a tensor of `letters_of`."""
    return bytes(letters.tolist()).decode()


def _numbered(told: CallSignature, num_tensors: int, takes_gradient: bool) -> CallSignature:
    return CallSignature(num_tensors, told.pattern, dtype=told.dtype, shape=told.shape, weight=float(takes_gradient))


def _bytes(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor as bytes, because the transport does not support every dtype."""
    return tensor.view(-1).view(torch.uint8)
