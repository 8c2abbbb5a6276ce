"""Snapshots in the forms of other programs: torch, torch.distributed.checkpoint, Parquet."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.snapshots.folder import Snapshot
from paceline.snapshots.reading import SavedDense, hyper_of, row_pieces
from paceline.update.rows.layout import IDS

StateDict = dict[str, Any]


def state_of(snapshot: Snapshot) -> StateDict:
    """Return a snapshot as tensors by name: "model", "optimizer" by table, and "rows" by table.

    The optimizer of a table is what a plain `torch.optim` optimizer over the same parameters loads, if its rule is one.
    """
    model, optimizer, rows = dict[str, Tensor](), StateDict(), StateDict()
    for table in snapshot.manifest.tables:
        if table.kind == "shape":
            saved = SavedDense(snapshot.folder, table)
            model |= {name: values.clone() for name, values in saved.values()}
            optimizer[table.name] = _optimizer_of(saved)
        else:
            pieces = [{IDS: piece.ids, **piece.columns} for piece in row_pieces(snapshot, table)]
            names = list(pieces[0]) if pieces else []
            rows[table.name] = {name: torch.cat([piece[name] for piece in pieces]) for name in names}
    return {"model": model, "optimizer": optimizer, "rows": rows}


def to_torch(snapshot: Snapshot, out: Path) -> None:
    """Write a file that `torch.load` reads, with weights_only, too."""
    with _writing(out):
        if out.exists() and not out.is_file():
            raise UsageError(f"{out} cannot be written: it is there, and is not a file. Name another place.")
        unfinished = out.with_name(f".{out.name}.unfinished")
        try:
            with unfinished.open("wb") as file:  # opened here, as torch takes not every name
                torch.save(state_of(snapshot), file)
            unfinished.replace(out)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise


def to_dcp(snapshot: Snapshot, out: Path) -> None:
    """Write a folder that `torch.distributed.checkpoint.load` reads, in one process or many."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    with _writing(out), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it takes this for a single process, which it is
        out.mkdir(parents=True, exist_ok=True)
        try:
            save(state_of(snapshot), storage_writer=FileSystemWriter(out), no_dist=True)
        except CheckpointException as error:  # which is not an `Exception`, and holds that of the only process
            raise next(wrapped[0] for wrapped in error.failures.values()) from error


def to_parquet(snapshot: Snapshot, out: Path) -> None:
    """Write the rows of each row table to a file of its own: a column of ids, and a list for each other column."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise UsageError("Parquet needs pyarrow, not installed here: pip install 'paceline[data]'") from error
    tables = [table for table in snapshot.manifest.tables if table.kind == "rows"]
    if not tables:
        raise UsageError(f"{snapshot.folder} has no rows, and Parquet takes nothing else: convert it to torch or dcp")
    with _writing(out):
        out.mkdir(parents=True, exist_ok=True)
        for number, table in enumerate(tables):
            writer = None
            for piece in row_pieces(snapshot, table):
                columns = {IDS: pa.array(piece.ids.numpy())}
                for name, column in piece.columns.items():
                    plain = column.float() if column.dtype is torch.bfloat16 else column  # which Parquet does not have
                    flat = pa.array(plain.reshape(-1).numpy())
                    columns[name] = pa.FixedSizeListArray.from_arrays(flat, column.shape[1])
                batch = pa.table(columns)
                writer = writer or pq.ParquetWriter(out / f"rows-{number:05d}.parquet", batch.schema)
                writer.write_table(batch)
            if writer is not None:
                writer.close()


def _optimizer_of(saved: SavedDense) -> StateDict:
    """Return the `state_dict` of the plain torch optimizer: torch counts parameters group by group."""
    segments = saved.spec.segments
    order = sorted(range(len(segments)), key=lambda index: segments[index].group)
    ids = {index: number for number, index in enumerate(order)}
    state = {ids[index]: {name: value.clone() for name, value in saved.states(index).items()} for index in order}
    groups = [
        {**numbers, "params": [ids[index] for index in order if segments[index].group == group]}
        for group, numbers in enumerate(hyper_of(saved.table) or saved.spec.rule.groups)
    ]
    return {"state": {number: found for number, found in state.items() if found}, "param_groups": groups}


@contextmanager
def _writing(out: Path) -> Generator[None]:
    """Name what cannot be written."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{out} cannot be written: {error.strerror or error}. Name another place.") from error
