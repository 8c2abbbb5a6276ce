"""Sufficient factors: the gradient of a linear layer's weight as the product of two small matrices, which are pushed.

Over K samples the gradient of a weight (M, N) is outputs^T inputs, of the gradients at the layer's outputs (K, M) and
its inputs (K, N): K (M + N) numbers in place of M N (Xie et al. 2016; "Poseidon", Zhang et al. 2017). Workers send
these where they are fewer, and the server forms the product before it looks at the push.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import msgspec
import torch
from torch import Tensor

from paceline.core.partition import Range
from paceline.update.table import TableSpec, cut

# How far sums of rounded products may lie apart, in units of their rounding errors as these add up by chance.
_SLACK: Final = 4.0
_BLOCK: Final = 64  # numbers of a row that are added in the gradient's own precision


class Factors(msgspec.Struct, frozen=True):
    """The factors of the gradient of a matrix (M, N) over K samples, of its dtype and on the CPU.

    Args:
        outputs: (K, M), the gradients at the outputs of the layer.
        inputs: (K, N), its inputs.

    Example:
        >>> factors = Factors(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0, 5.0]]))
        >>> factors.product()
        tensor([[ 3.,  4.,  5.],
                [ 6.,  8., 10.]])
        >>> factors.explain(factors.product()), factors.explain(2 * factors.product())
        (True, False)
    """

    outputs: Tensor
    inputs: Tensor

    @property
    def num_samples(self) -> int:
        """Number of samples, K."""
        return len(self.inputs)

    def product(self) -> Tensor:
        """Return the gradient, (M, N), by the same multiplication as autograd."""
        return self.outputs.t().mm(self.inputs)

    def explain(self, gradient: Tensor) -> bool:
        """Return whether a gradient (M, N) is the product, as far as rounding errors can tell.

        Both are multiplied by a vector of random signs (Freivalds 1977), which costs M N and not K M N. A term that
        is missing in the factors, or a gradient that was clipped, shows as soon as it exceeds rounding errors.
        """
        num_columns = self.inputs.shape[1]
        block = max(each for each in range(1, _BLOCK + 1) if num_columns % each == 0)
        inner, outer = _signs(block, gradient.dtype), _signs(num_columns // block, torch.float64)
        found = gradient.reshape(-1, block).mv(inner).double().view(-1, len(outer)).mv(outer)
        outputs, inputs = self.outputs.double(), self.inputs.double()
        expected = outputs.t().mv(inputs.mv(torch.outer(outer, inner.double()).view(-1)))
        spread = outputs.square().sum(1).dot(inputs.square().sum(1)).sqrt() + expected.norm()
        rounding = torch.finfo(gradient.dtype).eps * math.sqrt(self.num_samples + block)
        return bool((found - expected).norm() <= _SLACK * rounding * spread)


def _signs(num: int, dtype: torch.dtype) -> Tensor:
    """Return random signs, the same ones in every run; they leave torch's own random numbers as they are."""
    return torch.randint(0, 2, (num,), generator=torch.Generator().manual_seed(num)).mul_(2).sub_(1).to(dtype)


class MatrixPart(msgspec.Struct, frozen=True):
    """The part of a matrix that lies in the range of a server.

    Args:
        offset: its first element, counted from the start of the range.
        numel: its number of elements.
        first_row: the first row of the matrix that it touches.
        num_rows: the number of rows that it touches.
        skipped: elements of the first row that come before it.
        num_columns: of the matrix.
    """

    offset: int
    numel: int
    first_row: int
    num_rows: int
    skipped: int
    num_columns: int

    def num_elements(self, num_samples: int) -> int:
        """Return the number of elements of the factors of this part."""
        return num_samples * (self.num_rows + self.num_columns)

    def is_smaller(self, num_samples: int) -> bool:
        """Return whether the factors of so many samples have fewer elements than the gradient."""
        return self.num_elements(num_samples) < self.numel


def matrix_parts(spec: TableSpec, span: Range) -> dict[int, MatrixPart]:
    """Return the parts of matrices in the range of a server, by the index of their parameter in the table.

    Example:
        >>> from paceline.update.rules import RuleSpec
        >>> from paceline.update.table import Segment
        >>> segments = (Segment("weight", (4, 3)), Segment("bias", (4,)))
        >>> spec = TableSpec("w", segments, "float32", RuleSpec("add", ({},)), "bsp", "sum", "reject")
        >>> matrix_parts(spec, Range(1, 4, 16))
        {0: MatrixPart(offset=0, numel=8, first_row=1, num_rows=3, skipped=1, num_columns=3)}
    """
    found: dict[int, MatrixPart] = {}
    for piece in cut(spec, span):
        shape = spec.segments[piece.segment].shape
        if len(shape) == 2:
            first, skipped = divmod(piece.start, shape[1])
            num_rows = -(-piece.stop // shape[1]) - first
            found[piece.segment] = MatrixPart(piece.offset, piece.numel, first, num_rows, skipped, shape[1])
    return found


def pack(gradient: Tensor, parts: Mapping[int, MatrixPart], factors: Mapping[int, Factors]) -> Tensor:
    """Return the body of a push to one server: the gradient without some matrices, then the factors of these.

    Args:
        gradient: the server's part, (elements of its range,).
        parts: of matrices in the range.
        factors: of some of these, by index.
    """
    pieces, reached = list[Tensor](), 0
    for index in sorted(factors):
        part = parts[index]
        pieces.append(gradient[reached : part.offset])
        reached = part.offset + part.numel
    pieces.append(gradient[reached:])
    for index in sorted(factors):
        part, each = parts[index], factors[index]
        outputs = each.outputs[:, part.first_row : part.first_row + part.num_rows]
        pieces += [outputs.reshape(-1), each.inputs.reshape(-1)]
    return torch.cat(pieces)


def packed_elements(numel: int, parts: Mapping[int, MatrixPart], num_samples: Mapping[int, int]) -> int:
    """Return the number of elements of what `pack` makes for a range of `numel`, by the samples of each matrix."""
    return numel + sum(parts[index].num_elements(num) - parts[index].numel for index, num in num_samples.items())


def unpack(body: Tensor, parts: Mapping[int, MatrixPart], num_samples: Mapping[int, int], out: Tensor) -> None:
    """Write the gradient that `pack` was given to `out`, (elements of the range,), forming the products.

    The caller has checked that the body has `packed_elements`.
    """
    reached, at = 0, 0
    for index in sorted(num_samples):
        part = parts[index]
        length = part.offset - reached
        out[reached : part.offset] = body[at : at + length]
        reached, at = part.offset + part.numel, at + length
    out[reached:] = body[at : at + len(out) - reached]
    at += len(out) - reached
    for index in sorted(num_samples):
        part, num = parts[index], num_samples[index]
        outputs, inputs = body[at : at + part.num_elements(num)].split([num * part.num_rows, num * part.num_columns])
        at += part.num_elements(num)
        whole = Factors(outputs.view(num, part.num_rows), inputs.view(num, part.num_columns)).product()
        out[part.offset : part.offset + part.numel] = whole.view(-1)[part.skipped : part.skipped + part.numel]
