"""Records that have to be decoded: images, packed by zlib, made anew from a seed wherever they are held."""

import zlib

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset

SIDE = 96


class Packed(Dataset[tuple[bytes, int]]):
    """So many images as (packed bytes, label)."""

    def __init__(self, num_samples: int) -> None:
        levels = numpy.random.default_rng(0).integers(0, 16, (num_samples, SIDE, SIDE, 3), dtype=numpy.uint8)
        self._packed = [zlib.compress(image.tobytes()) for image in 16 * levels]

    def __len__(self) -> int:
        return len(self._packed)

    def __getitem__(self, index: int) -> tuple[bytes, int]:
        """Return one record as it is stored."""
        return self._packed[index], index % 10


class Decoded(Dataset[tuple[Tensor, int]]):
    """The same as (image, label), decoded by the process that asks."""

    def __init__(self, num_samples: int) -> None:
        self._records = Packed(num_samples)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return one record, decoded."""
        return decode(self._records[index])


def decode(record: tuple[bytes, int]) -> tuple[Tensor, int]:
    """Return the image as (3, SIDE, SIDE) numbers of float32 with mean 0 and variance 1, and its label."""
    packed, label = record
    levels = torch.frombuffer(bytearray(zlib.decompress(packed)), dtype=torch.uint8)
    image = levels.view(SIDE, SIDE, 3).permute(2, 0, 1).to(torch.float32)
    return (image - image.mean()) / image.std(), label
