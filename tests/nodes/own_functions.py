"""Functions that tests have servers run over their part of a table, by import path."""

import sys

import torch
from torch import Tensor

from paceline.update.rows.walk import RowWalk

HERE = "tests.nodes.own_functions"


def increment(values: Tensor, start: int, *, by: float = 1.0) -> dict[str, Tensor]:
    values.add_(by)
    return {"first": values[:1], "start": torch.tensor(start)}


def halve(values: Tensor, start: int) -> None:
    del start
    values.mul_(0.5)


def increment_rows(rows: RowWalk, *, by: float = 1.0) -> dict[str, Tensor]:
    for piece in rows.pieces():
        piece.values.add_(by)
        rows.put(piece)
    return {"num": torch.tensor(len(rows))}


def look(values: Tensor, start: int) -> dict[str, Tensor]:
    del start
    return {"values": values}


def change_one_row(rows: RowWalk, *, row: int, value: float) -> None:
    for piece in rows.pieces():
        piece.values[piece.ids == row] = value
        rows.put(piece)


def clear_state(rows: RowWalk) -> None:
    for piece in rows.pieces():
        for name, column in piece.columns.items():
            if name.startswith("state."):
                column.zero_()
        rows.put(piece)


# -- what goes wrong -------------------------------------------------------------------------------------------------


def divides_by_zero(values: Tensor, start: int) -> dict[str, Tensor]:
    values.fill_(7.0)
    return {"never": torch.tensor(1 // (start - start))}


def ends_the_process(values: Tensor, start: int) -> None:
    del values, start
    sys.exit(3)


def returns_a_list(values: Tensor, start: int) -> list[Tensor]:
    del start
    return [values]


def returns_numbers(values: Tensor, start: int) -> dict[str, float]:
    del start
    return {"sum": float(values.sum())}


def returns_too_much(values: Tensor, start: int) -> dict[str, Tensor]:
    del values, start
    return {"much": torch.zeros(1 << 27, dtype=torch.uint8)}


def brings_nan(values: Tensor, start: int) -> None:
    del start
    values[-1] = torch.nan


def grows(values: Tensor, start: int) -> None:
    del start
    values.resize_(values.numel() + 1)


def rows_divide_by_zero(rows: RowWalk) -> dict[str, Tensor]:
    for piece in rows.pieces():
        piece.values.add_(1.0)
        rows.put(piece)
    return {"never": torch.tensor(1 // (len(rows) - len(rows)))}


def rows_bring_infinity(rows: RowWalk) -> None:
    for piece in rows.pieces():
        piece.values.fill_(torch.inf)
        rows.put(piece)


def rows_of_other_ids(rows: RowWalk) -> None:
    for piece in rows.pieces():
        piece.ids.add_(1)
        rows.put(piece)


def rows_put_later(rows: RowWalk) -> None:
    for piece in list(rows.pieces()):
        rows.put(piece)


def rows_of_another_width(rows: RowWalk) -> None:
    for piece in rows.pieces():
        piece.values.resize_(len(piece.ids), 5)
        rows.put(piece)


NO_FUNCTION = 3
