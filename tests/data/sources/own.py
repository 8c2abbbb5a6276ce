"""Datasets and transforms that tests name by their import paths."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from paceline.errors import UsageError

PLAIN = 3


def squares(num: int, bad: int | None = None) -> list[int | None]:
    """A list of numbers, one of which may be none."""
    return [None if i == bad else i * i for i in range(num)]


def pairs() -> TensorDataset:
    """A dataset of torch."""
    return TensorDataset(torch.arange(12.0).view(6, 2), torch.arange(6))


def stream() -> Iterator[int]:
    """Nothing that has a length."""
    return iter(range(3))


def broken() -> None:
    """Fail to build."""
    raise FileNotFoundError("no folder train")


def refusing() -> None:
    """Fail with an error of ours."""
    raise UsageError("choose another one")


def half(record: Tensor) -> Tensor:
    """Change the record in place, as many transforms do."""
    return record.div_(2)


def number(line: str) -> float:
    """Read a number; fails on what is none."""
    return float(line)


def noisy(record: tuple[Tensor, Tensor], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Add noise that is the sample's own."""
    image, label = record
    return image + torch.randn(image.shape, generator=generator), label


def letters(line: str) -> tuple[str, int] | str:
    """Give records of two kinds."""
    return line if line.startswith("#") else (line, len(line))
