"""Claim 19: a dense layer's gradient is smaller as its factors, up to a batch that a formula gives; a hybrid picks."""

from __future__ import annotations

from typing import Any, Final

import torch

from paceline.tools.reproduce.claim import Check, Claim, ClaimOptions, Curve, Finding, Plot
from paceline.tools.reproduce.programs import command_line
from paceline.update.factors import Factors

_PROGRAM: Final = "benchmarks/factors.py"
_WIDTH: Final = 512
_BATCHES: Final = (8, 32, 128, 224, 255, 256, 512)
_ARGUMENTS: Final = (
    *("--width", str(_WIDTH), "--steps", "3", "--rounds", "1"),
    *("--batches", *map(str, _BATCHES)),
)
_TIMEOUT_S: Final = 600.0
_MACHINES: Final = 8  # workers, each with a server beside it
_LAYERS: Final = ((1024, 1024), (4096, 512), (512, 10))
_NUMBER: Final = 8  # bytes


def _run(options: ClaimOptions) -> Finding:
    found = options.programs.numbers(_PROGRAM, _ARGUMENTS, timeout_s=_TIMEOUT_S)
    rows = {pushes: _rows_of(found, pushes) for pushes in ("gradients", "factors")}
    off = max(abs(row["sent_mb"] / row["formula_mb"] - 1) for each in rows.values() for row in each)
    factored = [row["batch"] for row in rows["factors"] if row["num_factored"]]
    whole = [row["batch"] for row in rows["factors"] if not row["num_factored"]]
    expected = _WIDTH // 2  # M N / (M + N)
    crossings = {layer: _crossover(layer, options.seed) for layer in _LAYERS}
    formula = {layer: _formula(layer) for layer in _LAYERS}
    error = max(_error(layer, options.seed) for layer in _LAYERS)
    return Finding(
        (
            Check("bytes that a worker sends, by batch", "within 2 % of the formula", f"{off:.2%}", off <= 0.02),
            Check(
                "batch from which paceline sends gradients again, 512 x 512",
                f"M N / (M + N) = {expected}",
                f"factors up to {max(factored)}, gradients from {min(whole)}",
                (max(factored), min(whole)) == (expected - 1, expected),
            ),
            Check(
                "the same for factors sent to all: " + ", ".join(f"{m}x{n}" for m, n in _LAYERS),
                f"{', '.join(str(formula[each]) for each in _LAYERS)} by the paper's formula",
                ", ".join(str(crossings[each]) for each in _LAYERS),
                crossings == formula,
            ),
            Check(
                "gradient rebuilt from factors, relative error in float64",
                "at most 1e-12",
                f"{error:.0e}",
                error <= 1e-12,
            ),
        ),
        (_plot(rows),),
        "Jobs of one worker and one server over tcp, whose bytes the kernel counts: a network of two layers of 512 x "
        "512 under paceline.distributed(..., factors=True), and without. Workers push factors to servers, and values "
        "come back whole; the paper has workers send factors to each other, which is cheaper for few workers: that is "
        "the third check, and counts the tensors of a backward, for 8 machines. Synchronization behind the backward "
        "is another option, overlap=True, and goes with this one.",
        (command_line(_PROGRAM, _ARGUMENTS),),
    )


def _rows_of(found: dict[str, Any], pushes: str) -> list[dict[str, Any]]:
    return [row for row in found["rows"] if row["pushes"] == pushes]


def _plot(rows: dict[str, list[dict[str, Any]]]) -> Plot:
    """Return what a worker sends by batch, beside what the formula says."""

    def curve(label: str, pushes: str, key: str, *, is_reference: bool = False) -> Curve:
        batches = tuple(float(row["batch"]) for row in rows[pushes])
        return Curve(label, batches, tuple(float(row[key]) for row in rows[pushes]), is_reference=is_reference)

    return Plot(
        "What a worker sends in a step, two layers of 512 x 512",
        "batch",
        "MB",
        (
            curve("gradients", "gradients", "sent_mb"),
            curve("factors=True", "factors", "sent_mb"),
            curve("formula of the smaller", "factors", "formula_mb", is_reference=True),
        ),
        is_log_x=True,
        is_log_y=True,
    )


def _tensors(layer: tuple[int, int], batch: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return inputs, output gradients, and weight gradient (inputs x outputs) of one backward of a dense layer."""
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
    return float((Factors(inputs, outputs).product() - gradient).abs().max() / gradient.abs().max())


CLAIM: Final = Claim(
    "19",
    "Sufficient factors are smaller than the gradient up to a batch; a hybrid picks",
    "Zhang et al. 2017 (Poseidon)",
    "2K(P1-1)(M+N) <= 2MN(P1+P2-2)/P2",
    "real",
    (0.4, 0.4),
    _run,
    ("A5",),
)
