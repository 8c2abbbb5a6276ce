"""A table larger than its memory, trained beside one that fits: equal values, what is read ahead, the time of both."""

from __future__ import annotations

import tempfile
import time
from statistics import median
from typing import TYPE_CHECKING, Final

import msgspec
import torch

from paceline.update.named_rules import SGD
from paceline.update.rows.contribution import RowContribution
from paceline.update.rows.ops import row_ops
from paceline.update.rows.read_ahead import SpillReads
from paceline.update.rows.rules import row_rule
from paceline.update.rows.spec import Lifecycle, RowTableSpec
from paceline.update.rows.store import RowStore

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.tools.reproduce.claim import ClaimOptions

_WIDTH: Final = 128
_LAYER_ROWS: Final = 2048
_NUM_LAYERS: Final = 24
_BUDGET_BYTES: Final = 6 << 20
_BATCH: Final = 384


class SwapFinding(msgspec.Struct, frozen=True):
    """What became of both tables.

    Args:
        is_equal: whether they ended with the same bits.
        resident_ms: of each step of the one that fits.
        swapped_ms: of each step of the other.
        ahead: which share of the bytes that the other mapped, from the second step on, was asked for ahead.
        in_time: which share of these was there before it was needed.
        facts: what was run, in words.
    """

    is_equal: bool
    resident_ms: tuple[float, ...]
    swapped_ms: tuple[float, ...]
    ahead: float
    in_time: float
    facts: str

    @property
    def slowdown(self) -> float:
        """Return the median step beyond memory over the median step within it."""
        return median(self.swapped_ms) / median(self.resident_ms)


def swap(options: ClaimOptions) -> SwapFinding:
    """Train a stack of layers, kept as rows, once in memory and once in a fourth of it with a file for the rest."""
    num_steps = 10 if options.is_quick else 30
    with tempfile.TemporaryDirectory(prefix="paceline-swap-") as folder:
        life = Lifecycle(memory_bytes=_BUDGET_BYTES, spill=folder)
        tables = [_store(Lifecycle()), _store(life)]
        try:
            for table in tables:
                _fill(table, options.seed)
            times: list[list[float]] = [[], []]
            first = SpillReads()
            for step in range(num_steps):  # in turns, so that other work on the machine meets both
                for place, table in enumerate(tables):
                    times[place].append(_step_ms(table, options.seed + step))
                first = tables[1].spill_reads if step == 0 else first
            last = tables[1].spill_reads
            is_equal = all(_layer(tables[0], each).equal(_layer(tables[1], each)) for each in range(_NUM_LAYERS))
        finally:
            for table in tables:
                table.close()
    facts = (
        f"{_NUM_LAYERS} layers of {_LAYER_ROWS} x {_WIDTH} float32, 24 MiB, in a table of {_BUDGET_BYTES >> 20} MiB; "
        "a step reads, uses and updates all of them."
    )
    ahead = last.ahead_bytes - first.ahead_bytes
    asked = ahead + last.late_bytes - first.late_bytes
    waited = last.waited_bytes - first.waited_bytes
    share, in_time = asked / max(1, asked + waited), ahead / max(1, asked)
    return SwapFinding(is_equal, tuple(times[0]), tuple(times[1]), share, in_time, facts)


def _store(life: Lifecycle) -> RowStore:
    spec = RowTableSpec("layers", _WIDTH, "float32", SGD(lr=0.01), "bsp", "sum", "ignore", life=life)
    return RowStore(spec, row_rule(spec.rule, allowed=None), row_ops())


def _ids(layer: int) -> Tensor:
    return torch.arange(layer * _LAYER_ROWS, (layer + 1) * _LAYER_ROWS)


def _layer(table: RowStore, layer: int) -> Tensor:
    return table.read(_ids(layer), 0)


def _fill(table: RowStore, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for layer in range(_NUM_LAYERS):
        table.apply([RowContribution(_ids(layer), torch.randn(_LAYER_ROWS, _WIDTH, generator=generator))], 0)


def _step_ms(table: RowStore, seed: int) -> float:
    """Pull each layer, compute a gradient of it on a batch, push that; return what all of it took."""
    inputs = torch.randn(_BATCH, _LAYER_ROWS, generator=torch.Generator().manual_seed(seed))
    began_s = time.perf_counter()
    for layer in range(_NUM_LAYERS):
        weights = _layer(table, layer)
        outputs = torch.tanh(inputs @ weights)
        gradient = inputs.t() @ (outputs * (1 - outputs**2)) / _BATCH
        table.apply([RowContribution(_ids(layer), gradient)], 1)
    return (time.perf_counter() - began_s) * 1000
