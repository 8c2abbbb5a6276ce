"""Tensors of a version, from a layout that came with it."""

import pytest
import torch

from paceline.errors import PeerError
from paceline.versions.contents import tensors_of
from paceline.wire.versions import PublishedTensor, VersionLayout


def test_a_tensor_without_elements_has_its_shape() -> None:
    found = tensors_of(VersionLayout((PublishedTensor("a", "w", 0, (3, 0), "float16"),)), (), ())
    assert (found["a"].shape, found["a"].dtype) == (torch.Size([3, 0]), torch.float16)


@pytest.mark.parametrize("shape", [(0, 2**62, 2**62), (2**61, 2**61, 0), (2**62, 2)])
def test_a_shape_that_torch_cannot_have_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(PeerError, match=r"has the shape .*, which torch cannot have"):
        tensors_of(VersionLayout((PublishedTensor("a", "w", 0, shape, "float32"),)), (), ())
