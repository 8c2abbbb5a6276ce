"""Tables of text on standard output, and the text below them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

_USUAL_COLUMNS: Final = 80
_MOST_COLUMNS: Final = 10_000


def print_tables(tables: Sequence[Table], told: str = "") -> None:
    """Print tables, a line between them, and a text that is filled to the width of the terminal.

    No number is cut off for lack of columns, as a part of one looks like another: on a terminal of less than 80 columns
    lines are as long as on one of 80, and where there is no terminal they are as long as they need.
    """
    from rich.console import Console
    from rich.measure import Measurement

    console = Console(markup=False)
    for table in tables:
        needed = Measurement.get(console, console.options.update(width=_MOST_COLUMNS), table).maximum
        width = min(needed, _USUAL_COLUMNS) if console.is_terminal else needed
        Console(markup=False, width=max(console.width, width)).print(table)
        if told:
            console.print()
    if told:
        console.print(told, highlight=False)
