"""Claim 24: split layers need four sums a block, and compute what whole layers do."""

from __future__ import annotations

from typing import Final

import torch

from paceline.tools.reproduce.claim import Check, Claim, ClaimOptions, Finding
from paceline.tools.reproduce.claims.ring import OVER_TCP, PROGRAM, TIMEOUT_S, bytes_plot, rows_of, worst_error
from paceline.tools.reproduce.programs import command_line

_WIDTH: Final = 32


def _run(options: ClaimOptions) -> Finding:
    found = options.programs.numbers(PROGRAM, (), timeout_s=TIMEOUT_S, environment=OVER_TCP)
    rows = rows_of(found, "tensor")
    error = _split_error(options.seed)
    return Finding(
        (
            Check(
                "bytes of a worker: 4 sums of the activations a block",
                "the formula of rings, within 2 %",
                f"{worst_error(rows):.2%} off",
                worst_error(rows) <= 0.02,
            ),
            Check(
                "columns, then rows, in float64: outputs and gradients",
                "relative error at most 1e-10",
                f"{error:.0e}",
                error <= 1e-10,
            ),
        ),
        (bytes_plot("Four blocks split over 2 and 4 workers", rows),),
        "Bytes of real jobs under tensor:2 and tensor:4, two sums forward and two backward in each block. The error "
        "is that of a layer split in two by hand; "
        "the library's own layers are compared with whole ones in tests/model_parallel.",
        (command_line(PROGRAM, (), OVER_TCP),),
    )


def _split_error(seed: int) -> float:
    """Split a perceptron's first matrix by columns and its second by rows; return how far it is from the whole."""
    generator = torch.Generator().manual_seed(seed)
    inputs, first, second = (
        torch.randn(_WIDTH, _WIDTH, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(3)
    )
    whole = torch.nn.functional.gelu(inputs @ first) @ second
    half = _WIDTH // 2
    parts = [
        torch.nn.functional.gelu(inputs @ first[:, chosen]) @ second[chosen]
        for chosen in (slice(0, half), slice(half, _WIDTH))
    ]
    split = parts[0] + parts[1]
    exact = torch.autograd.grad(whole.square().sum(), (inputs, first, second))
    ours = torch.autograd.grad(split.square().sum(), (inputs, first, second))
    pairs = [(whole, split), *zip(exact, ours, strict=True)]
    return max(float(((one - other).norm() / one.norm()).detach()) for one, other in pairs)


CLAIM: Final = Claim(
    "24",
    "Layers split by columns and rows are exact, with 4 sums a block",
    "Shoeybi et al. 2019 (Megatron-LM)",
    "4 all-reduces a layer",
    "real",
    (0.7, 0.7),
    _run,
)
