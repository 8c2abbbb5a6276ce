"""Samples from the rows of Parquet files."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, Final

import msgspec
import numpy as np

from paceline.data.sources.collating import UnfitRecord
from paceline.data.sources.declared import Parquet
from paceline.data.sources.input_files import FixedFiles, find_files, position_in, reading
from paceline.errors import DataError, UsageError

_MOST_DECODED_BYTES: Final = 256 << 20


class _Group(msgspec.Struct, frozen=True):
    """A row group: its file, and its number there."""

    path: str
    number: int


class _Decoded(msgspec.Struct, frozen=True):
    """A row group in memory.

    Args:
        size_bytes: of everything.
        numbers: the columns of numbers.
        missing: for columns with nulls, which rows are null.
        others: texts and lists, as Arrow arrays: short texts as Python objects take many times as much memory.
    """

    size_bytes: int
    numbers: dict[str, np.ndarray[Any, Any]]
    missing: dict[str, np.ndarray[Any, Any]]
    others: dict[str, Any]


class _Damaged(Exception):
    """The content of a file is damaged."""


class TableRows:
    """The rows of Parquet files. A row group is decoded when one of its rows is read; the last ones used are kept."""

    def __init__(self, source: Parquet) -> None:
        self._arrow, self._parquet = _pyarrow()
        paths = find_files(source.paths)
        self._files = FixedFiles(paths)
        self._kept: OrderedDict[int, _Decoded] = OrderedDict()
        self._damaged: dict[int, str] = {}  # why groups cannot be decoded, by number
        self._groups: list[_Group] = []
        self._metadata: dict[str, Any] = {}
        self._schema: Any = None
        self._columns = source.columns or ()
        sizes = [size for path in paths for size in self._open(path, source.columns)]
        self._firsts = list(accumulate(sizes, initial=0))  # the first sample of each group, and then their number

    @property
    def num_samples(self) -> int:
        """Number of rows."""
        return self._firsts[-1]

    def gather(self, indices: Sequence[int]) -> None:
        """Return None: any row may have nulls, so rows are read one by one."""

    def record(self, index: int) -> dict[str, object]:
        """Return one row."""
        number, row = position_in(self._firsts, index)
        group = self._decoded(number)
        return {name: self._value(group, name, row) for name in self._columns}

    def name(self, index: int) -> str:
        """Return the name of a record."""
        number, row = position_in(self._firsts, index)
        group = self._groups[number]
        return f"row {row} of row group {group.number} of {group.path}"

    def check(self) -> None:
        """Do nothing: decoding a row group checks its file."""

    def describe(self) -> object:
        """Return names, sizes, columns and types."""
        types = [(name, str(self._schema.field(name).type)) for name in self._columns]
        return [self._files.describe(), types, self._firsts]

    def close(self) -> None:
        """Drop the decoded row groups; files are open only while they are read."""
        self._kept.clear()

    # -- opening -----------------------------------------------------------------------------------------------------

    def _open(self, path: str, columns: tuple[str, ...] | None) -> list[int]:
        """Record the row groups of a file, and return the number of rows of each."""
        try:
            with self._reading(path), self._file(path) as file:
                schema, metadata = file.schema_arrow, file.metadata
        except _Damaged as error:
            raise DataError(f"{path} cannot be read as a Parquet file: {error}. Was it written to its end?") from error
        if self._schema is None:
            self._columns = columns or tuple(schema.names)
            self._schema = schema
        self._check_columns(path, schema)
        others = [name for name in schema.names if name not in self._columns] if columns is None else []
        if others:
            raise DataError(
                f"{path} has the columns {', '.join(others)}, which the files before it do not have: name the columns "
                "that are wanted."
            )
        self._metadata[path] = metadata
        self._groups += [_Group(path, number) for number in range(metadata.num_row_groups)]
        return [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]

    def _check_columns(self, path: str, schema: Any) -> None:  # noqa: ANN401 - pyarrow has no types
        for name in self._columns:
            if schema.names.count(name) != 1:
                num = schema.names.count(name)
                raise DataError(f"{path} has {num} columns {name}, expected one: it has {', '.join(schema.names)}.")
            found, first = schema.field(name).type, self._schema.field(name).type
            if found != first:
                raise DataError(f"column {name} of {path} is {found}, and {first} in the files before it.")
            if not self._is_known(found):
                raise DataError(
                    f"column {name} of {path} is {found}, expected numbers, bool, strings, binary or lists of numbers: "
                    "name the other columns."
                )

    def _is_known(self, kind: Any) -> bool:  # noqa: ANN401 - pyarrow has no types
        types = self._arrow.types
        if types.is_dictionary(kind):
            return self._is_text(kind.value_type)
        if self._is_list(kind):
            return self._is_number(kind.value_type)
        return self._is_number(kind) or self._is_text(kind)

    def _is_list(self, kind: Any) -> bool:  # noqa: ANN401 - pyarrow has no types
        types = self._arrow.types
        return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)

    def _is_number(self, kind: Any) -> bool:  # noqa: ANN401 - pyarrow has no types
        types = self._arrow.types
        return types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)

    def _is_text(self, kind: Any) -> bool:  # noqa: ANN401 - pyarrow has no types
        types = self._arrow.types
        is_text = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
        return any(found(kind) for found in (*is_text, types.is_fixed_size_binary))

    # -- reading -----------------------------------------------------------------------------------------------------

    def _decoded(self, number: int) -> _Decoded:
        if number in self._kept:
            self._kept.move_to_end(number)
            return self._kept[number]
        if number in self._damaged:
            raise UnfitRecord(self._damaged[number])
        try:
            decoded = self._kept[number] = self._decode(self._groups[number])
        except UnfitRecord as error:
            self._damaged[number] = str(error)
            raise
        while len(self._kept) > 1 and sum(group.size_bytes for group in self._kept.values()) > _MOST_DECODED_BYTES:
            self._kept.popitem(last=False)
        return decoded

    def _decode(self, group: _Group) -> _Decoded:
        table = self._table(group)
        columns = {name: table.column(name).combine_chunks() for name in self._columns}
        numbers = {name: column for name, column in columns.items() if self._is_number(column.type)}
        values = {name: self._numbers(column) for name, column in numbers.items()}
        missing = {name: column.is_null().to_numpy(False) for name, column in numbers.items() if column.null_count}
        others = {name: column for name, column in columns.items() if name not in numbers}
        size_bytes = sum(array.nbytes for array in (*values.values(), *missing.values()))
        size_bytes += sum(column.get_total_buffer_size() for column in others.values())
        return _Decoded(size_bytes, values, missing, others)

    def _table(self, group: _Group) -> Any:  # noqa: ANN401 - pyarrow has no types
        """Read a row group; raises UnfitRecord if the file is damaged there."""
        metadata = self._metadata[group.path]
        try:
            with self._reading(group.path), self._file(group.path, metadata=metadata) as file:
                table = file.read_row_group(group.number, columns=list(self._columns), use_threads=False)
        except _Damaged as error:
            self._files.check_one(group.path)  # if it was changed, that is why
            raise UnfitRecord(f"the whole row group cannot be decoded: {error}") from error
        self._files.check_one(group.path)
        return table

    def _file(self, path: str, **options: Any) -> Any:  # noqa: ANN401 - pyarrow has no types
        return self._parquet.ParquetFile(path, pre_buffer=False, page_checksum_verification=True, **options)

    def _numbers(self, column: Any) -> np.ndarray[Any, Any]:  # noqa: ANN401 - pyarrow has no types
        """Return the values of a column, with 0 for nulls, which keeps the dtype."""
        filled = column.fill_null(False if self._arrow.types.is_boolean(column.type) else 0)
        return filled.to_numpy(zero_copy_only=False)

    def _value(self, group: _Decoded, name: str, row: int) -> object:
        value = None
        if name in group.others:
            found = group.others[name][row]
            value = self._list(found, name) if self._is_list(found.type) else found.as_py()
        elif name not in group.missing or not group.missing[name][row]:
            value = group.numbers[name][row]
        if value is None:
            raise UnfitRecord(f"column {name} has no value in it")
        return value

    def _list(self, found: Any, name: str) -> np.ndarray[Any, Any] | None:  # noqa: ANN401 - pyarrow has no types
        if not found.is_valid:
            return None
        if found.values.null_count:
            raise UnfitRecord(f"the list in column {name} has a value missing")
        return found.values.to_numpy(zero_copy_only=False)

    @contextmanager
    def _reading(self, path: str) -> Generator[None]:
        """Turn errors of pyarrow about content into _Damaged, and errors of the system into DataError."""
        with reading(path):
            try:
                yield
            except MemoryError as error:  # pyarrow's own is one, too
                raise DataError(f"{path} needs more memory than there is, or is damaged: {error}.") from error
            except (self._arrow.ArrowException, OSError) as error:
                if isinstance(error, OSError) and error.errno is not None:
                    raise
                raise _Damaged(str(error)) from error


def _pyarrow() -> tuple[Any, Any]:
    """Import pyarrow, an optional dependency."""
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise UsageError("reading Parquet needs pyarrow, not installed here: pip install 'paceline[data]'.") from error
    return pyarrow, parquet
