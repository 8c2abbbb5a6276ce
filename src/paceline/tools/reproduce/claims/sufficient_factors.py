"""Claim 19: a dense layer's gradient is smaller as its factors, up to a batch that a formula gives; a hybrid picks."""

from __future__ import annotations

from typing import Final

import torch

from paceline.tools.reproduce.claim import Check, Claim, ClaimOptions, Curve, Finding, Plot

_MACHINES: Final = 8  # workers, each with a server beside it
_BATCHES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
_LAYERS: Final = ((1024, 1024), (4096, 512), (512, 10))
_NUMBER: Final = 8  # bytes


def _run(options: ClaimOptions) -> Finding:
    found = {layer: _crossover(layer, options.seed) for layer in _LAYERS}
    expected = {layer: _formula(layer) for layer in _LAYERS}
    worst = max(abs(found[layer] - expected[layer]) for layer in _LAYERS)
    layer = _LAYERS[0]
    batches = tuple(map(float, _BATCHES))
    factors = tuple(
        _factor_bytes(_tensors(layer, min(batch, 64), options.seed)) * batch / min(batch, 64) / 1e6
        for batch in _BATCHES
    )
    matrix = _matrix_bytes(_tensors(layer, 1, options.seed)) / 1e6
    picked = tuple(min(matrix, each) for each in factors)
    error = max(_error(each, options.seed) for each in _LAYERS)
    saved = factors[_BATCHES.index(32)] / matrix
    return Finding(
        (
            Check(
                "gradient rebuilt from factors, relative error in float64",
                "at most 1e-12",
                f"{error:.0e}",
                error <= 1e-12,
            ),
            Check(
                "batch from which the matrix is smaller: " + ", ".join(f"{m}x{n}" for m, n in _LAYERS),
                f"{', '.join(str(expected[each]) for each in _LAYERS)} by the formula",
                ", ".join(str(found[each]) for each in _LAYERS),
                worst == 0,
            ),
            Check(
                "1024 x 1024, batch 32: factors beside the matrix",
                "0.250 by the formula, within 2 %",
                f"{saved:.3f}",
                abs(saved / 0.25 - 1) <= 0.02,
            ),
        ),
        (
            Plot(
                f"What a machine sends and receives in a step, layer {layer[0]} x {layer[1]}, {_MACHINES} machines",
                "batch of a worker",
                "MB",
                (
                    Curve("sufficient factors to all", batches, factors),
                    Curve("matrix by servers", batches, (matrix,) * len(batches)),
                    Curve("hybrid: the smaller", batches, picked, is_reference=True),
                ),
                is_log_x=True,
                is_log_y=True,
            ),
        ),
        "Bytes of the tensors that torch's backward hands over (inputs and output gradients, or the gradient), "
        "times the machines that get them; frames are left out. "
        "Paceline's pushes carry gradients; it has no push of factors, so the hybrid is computed here and not a "
        "mode of a job. "
        "Synchronization behind the backward is one: paceline.distributed(..., overlap=True).",
    )


def _tensors(layer: tuple[int, int], batch: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return inputs, output gradients, and weight gradient of one backward of a dense layer."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(layer, generator=generator, dtype=torch.float64, requires_grad=True)
    inputs = torch.randn(batch, layer[0], generator=generator, dtype=torch.float64)
    inner = inputs @ weight
    inner.retain_grad()
    torch.tanh(inner).square().sum().backward()
    if weight.grad is None or inner.grad is None:
        raise AssertionError("backward has left no gradient")
    return inputs, inner.grad, weight.grad


def _factor_bytes(tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> int:
    """Return what a machine sends to and gets from all others when each sends its factors."""
    inputs, outputs, _ = tensors
    return 2 * (_MACHINES - 1) * (inputs.numel() + outputs.numel()) * _NUMBER


def _matrix_bytes(tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> int:
    """Return what a machine, a worker and a server, sends and gets: every part of the matrix but its own, twice."""
    return 2 * tensors[2].numel() * _NUMBER * (2 * _MACHINES - 2) // _MACHINES


def _crossover(layer: tuple[int, int], seed: int) -> int:
    """Return the first batch whose factors are larger than the matrix, found by halving."""
    one = _tensors(layer, 1, seed)
    matrix = _matrix_bytes(one)
    low, high = 0, 1 << 20
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _factor_bytes(one) * middle > matrix else (middle, high)
    return high


def _formula(layer: tuple[int, int]) -> int:
    """Return the first batch with 2 K (P - 1)(M + N) > 2 M N (2 P - 2) / P."""
    rows, columns = layer
    return int(2 * rows * columns / (_MACHINES * (rows + columns))) + 1


def _error(layer: tuple[int, int], seed: int) -> float:
    inputs, outputs, gradient = _tensors(layer, 16, seed)
    return float((inputs.t() @ outputs - gradient).abs().max() / gradient.abs().max())


CLAIM: Final = Claim(
    "19",
    "Sufficient factors are smaller than the gradient up to a batch; a hybrid picks",
    "Zhang et al. 2017 (Poseidon)",
    "2K(P1-1)(M+N) <= 2MN(P1+P2-2)/P2",
    "counted",
    (0.1, 0.1),
    _run,
    ("A5",),
)
