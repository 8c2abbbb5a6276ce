"""Numbers of a comparison, as a table and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.tools.compare.reading import Result

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from paceline.tools.compare.running import RunEnded

_MEGA = 1e6


def comparison_table(outcomes: Sequence[Result | RunEnded]) -> Table:
    """Return one line for each strategy, in the order in which they ran."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("strategy@workers", no_wrap=True)
    for heading in ("loss", "held out", "seconds", "samples/s", "sent, received a step", "peak memory"):
        table.add_column(heading, justify="right", header_style="dim", no_wrap=True)
    for outcome in outcomes:
        if isinstance(outcome, Result):
            table.add_row(outcome.label, *_cells(outcome))
        else:
            table.add_row(str(outcome.entry), "failed")
    return table


def _cells(result: Result) -> list[str]:
    traffic = result.traffic
    return [
        _loss(result.final_loss),
        _loss(result.held_out_loss),
        f"{result.summary.seconds:.1f}",
        f"{result.samples_per_s:,.0f}",
        "-" if traffic is None else f"{megabytes(traffic.sent_bytes)}, {megabytes(traffic.received_bytes)}",
        "-" if result.peak_bytes is None else megabytes(result.peak_bytes),
    ]


def _loss(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.3f}"


def megabytes(size_bytes: float) -> str:
    """Write a size in megabytes, with as many digits as say something.

    >>> megabytes(3_456_000), megabytes(345_600_000), megabytes(1_200)
    ('3.5 MB', '346 MB', '0.001 MB')
    """
    size_mb = size_bytes / _MEGA
    digits = 0 if size_mb >= 100 or not size_bytes else 1 if size_mb >= 1 else 3
    return f"{size_mb:.{digits}f} MB"


def comparison_json(outcomes: Sequence[Result | RunEnded]) -> dict[str, dict[str, object]]:
    """Return the same by strategy, with all digits."""
    return {
        str(outcome.entry): _numbers(outcome) if isinstance(outcome, Result) else {"failed": outcome.last_words}
        for outcome in outcomes
    }


def _numbers(result: Result) -> dict[str, object]:
    traffic = result.traffic
    return {
        "workers": result.entry.num_workers,
        "final_loss": result.final_loss,
        "held_out_loss": result.held_out_loss,
        "seconds": result.summary.seconds,
        "samples": result.num_samples,
        "samples_per_s": result.samples_per_s,
        "steps": result.summary.num_clocks,
        "sent_bytes_per_worker_and_step": None if traffic is None else traffic.sent_bytes,
        "received_bytes_per_worker_and_step": None if traffic is None else traffic.received_bytes,
        "peak_bytes": result.peak_bytes,
    }
