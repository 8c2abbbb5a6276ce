"""Declared sources of training examples, and batch recipes, as plain data. They are opened where batches are made.

Paths are relative to the folder in which the job runs, which all its processes share; where data servers are used, the
files have to be theirs to read. A pattern, `shards/*.tar`, stands for the files that match it, sorted by name.

What a record is depends on the source; batches of records are made as torch's `default_collate` makes them.

Example:
    >>> import paceline
    >>> paceline.sources.arrays("digits.npz", "images", "labels").arrays[1].member
    'labels'
    >>> paceline.sources.lines("books/*.txt").paths
    ('books/*.txt',)
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike, fspath
from typing import Any, Final, Literal, TypeAlias, cast

import msgspec

from paceline.errors import PeerError, UsageError
from paceline.update.user_code import split_path

__all__ = ["Source", "arrays", "dataset", "lines", "parquet", "tensors", "webdataset"]

_MOST_DEEP: Final = 32
_SHOWN: Final = 50  # characters of a field in a message

Path: TypeAlias = str | PathLike[str]
Paths: TypeAlias = Path | Sequence[Path]
Plain: TypeAlias = "bool | int | float | str | Sequence[Plain] | Mapping[str, Plain] | None"
OnError: TypeAlias = Literal["raise", "skip"]


class ArrayFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One array: a .npy file, or a member of an .npz file."""

    path: str
    member: str | None = None


class _Listed(msgspec.Struct, frozen=True):
    """Files to read, of which there may be many: their `repr` counts them."""

    def __repr__(self) -> str:
        told = (f"{name}={_counted(getattr(self, name))}" for name in self.__struct_fields__)
        return f"{type(self).__name__}({', '.join(told)})"


def _counted(value: object) -> str:
    if isinstance(value, tuple | dict) and len(cast("tuple[object, ...]", value)) > 1:
        return f"<{len(cast('tuple[object, ...]', value))}>"
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


class Arrays(_Listed, frozen=True, forbid_unknown_fields=True, tag="arrays"):
    """Arrays of numpy; with names a record is a dict, else a tuple, or the one tensor."""

    arrays: tuple[ArrayFile, ...]
    names: tuple[str, ...] | None = None


class Tensors(_Listed, frozen=True, forbid_unknown_fields=True, tag="tensors"):
    """Tensors of a safetensors file; a record is a tuple, or the one tensor."""

    path: str
    names: tuple[str, ...]


class Lines(_Listed, frozen=True, forbid_unknown_fields=True, tag="lines"):
    """Lines of text files; without an encoding they stay bytes."""

    paths: tuple[str, ...]
    encoding: str | None


class Parquet(_Listed, frozen=True, forbid_unknown_fields=True, tag="parquet"):
    """Rows of Parquet files; without columns, all of them."""

    paths: tuple[str, ...]
    columns: tuple[str, ...] | None


class WebDataset(_Listed, frozen=True, forbid_unknown_fields=True, tag="webdataset"):
    """Samples of tar files."""

    paths: tuple[str, ...]


class OwnDataset(_Listed, frozen=True, forbid_unknown_fields=True, tag="dataset"):
    """A dataset of the user's, and what it is built with."""

    path: str
    arguments: dict[str, Any]


Source: TypeAlias = Arrays | Tensors | Lines | Parquet | WebDataset | OwnDataset


def arrays(file: Path | None = None, /, *members: str, **named: Path) -> Arrays:
    """Return the source of arrays of numpy whose first dimension counts the samples.

    The files are mapped into memory, not read; only compressed members of an .npz file are read when it is opened.

    Args:
        file: an .npz file with these members, or a single .npy file.
        members: the arrays of the .npz file that make up a record, a tuple of tensors in this order; one member alone
            gives that tensor.
        named: .npy files instead, and a record is a dict of tensors of these names.

    Raises:
        UsageError: neither a file nor names, both, or an .npz file without members.

    Example:
        >>> len(arrays("digits.npz", "images", "labels").arrays)
        2
        >>> arrays(images="images.npy", labels="labels.npy").names
        ('images', 'labels')
    """
    if (file is None) == (not named):
        raise UsageError(
            "arrays() takes one file, arrays('digits.npz', 'images', 'labels') for example, or names and their files, "
            "arrays(images='x.npy', labels='y.npy')."
        )
    if file is None:
        return Arrays(tuple(ArrayFile(_path(path)) for path in named.values()), tuple(named))
    path = _path(file)
    if not members and not path.endswith(".npy"):
        raise UsageError(f"arrays({path!r}) does not say which arrays: name them, arrays({path!r}, 'images').")
    if members and path.endswith(".npy"):
        raise UsageError(
            f"arrays({path!r}, {members[0]!r}) names a .npy file, which has one array, and something in it: where "
            f"arrays lie in several files, name them, arrays(images={path!r}, labels={members[0]!r}) for example."
        )
    names = _names(members, "array") if members else (None,)
    return Arrays(tuple(ArrayFile(path, member) for member in names))


def tensors(file: Path, *names: str) -> Tensors:
    """Return the source of tensors of a safetensors file whose first dimension counts the samples.

    The file is mapped into memory, not read. A record is a tuple of tensors in the order of the names; one name alone
    gives that tensor.

    Raises:
        UsageError: no names.

    Example:
        >>> tensors("digits.safetensors", "images", "labels").names
        ('images', 'labels')
    """
    if not names:
        raise UsageError(f"tensors({_path(file)!r}) does not say which tensors: name at least one.")
    return Tensors(_path(file), _names(names, "tensor"))


def lines(files: Paths, *, encoding: str = "utf-8", binary: bool = False) -> Lines:
    r"""Return the source of the lines of text files, each a record: a str without the end of the line.

    Where each line begins is found once, when the files are opened: 8 bytes of memory a line.

    Args:
        files: one path or pattern, or several.
        encoding: of the text; one in which the line feed is a byte of its own, as in UTF-8. With "utf-8-sig" a byte
            order mark at the beginning of a file is left out, else it is part of its first line.
        binary: lines are bytes, whatever the encoding.

    Raises:
        UsageError: no files, or an encoding that is not known, or in which a line feed is not one byte.

    Example:
        >>> lines("books/*.txt", encoding="latin-1")
        Lines(paths=('books/*.txt',), encoding='latin-1')
    """
    return Lines(_paths(files), None if binary else _encoding(encoding))


def parquet(files: Paths, *, columns: Sequence[str] | None = None) -> Parquet:
    """Return the source of the rows of Parquet files, each a record: a dict of numbers, arrays, str and bytes.

    Needs `pip install 'paceline[data]'` where batches are made. A row group is decoded as a whole when a row of it is
    wanted, and those used last are kept: where samples are shuffled, write small row groups.

    Args:
        files: one path or pattern, or several, all with the same columns.
        columns: those that are wanted, in this order; None for all.

    Raises:
        UsageError: no files, or an empty list of columns.

    Example:
        >>> parquet("clicks/*.parquet", columns=["user", "item", "clicked"]).columns
        ('user', 'item', 'clicked')
    """
    if columns is not None and (isinstance(columns, str) or not columns):
        raise UsageError(f"columns is {columns!r}, expected a list of names, or None for all columns.")
    return Parquet(_paths(files), None if columns is None else _names(tuple(columns), "column"))


def webdataset(files: Paths) -> WebDataset:
    """Return the source of the samples of tar files as WebDataset has them.

    Consecutive files of one name up to the first dot are a sample. A record is a dict: what comes after that dot to
    the content as bytes, and "__key__" to the name. Decode them by a transform. The tar files must not be compressed;
    where each file lies is found once, when they are opened.

    Raises:
        UsageError: no files.

    Example:
        >>> webdataset("shards/train-*.tar")
        WebDataset(paths=('shards/train-*.tar',))
    """
    return WebDataset(_paths(files))


def dataset(path: str, /, **arguments: Plain) -> OwnDataset:
    """Return the source of a dataset of your own, which is built where batches are made.

    Args:
        path: "module:name" of a function or class that returns an object with `__len__` and `__getitem__`, a
            `torch.utils.data.Dataset` or a list for example. What it gives for an index has to depend on that alone.
        arguments: it is called with these: plain data.

    Raises:
        UsageError: the path is none, or an argument is not plain data.

    Example:
        >>> dataset("my_package.data:Images", folder="train", size=224).arguments
        {'folder': 'train', 'size': 224}
    """
    split_path(path, "dataset")
    for name, value in arguments.items():
        _check_plain(value, f"argument {name} of {path}")
    return OwnDataset(path, dict(arguments))


def check_source(source: Source) -> None:
    """Raise UsageError for a description that none of these functions gives, but another process may."""
    match source:
        case Arrays():
            if not source.arrays or (source.names is not None and len(source.names) != len(source.arrays)):
                raise UsageError(f"there are {len(source.arrays)} arrays, expected at least one, and each has a name.")
            _paths([file.path for file in source.arrays])
        case Tensors():
            tensors(source.path, *source.names)
        case Lines():
            lines(source.paths, encoding=source.encoding or "utf-8")
        case Parquet():
            parquet(source.paths, columns=source.columns)
        case WebDataset():
            webdataset(source.paths)
        case OwnDataset():
            dataset(source.path, **source.arguments)
        case _:  # pyright: ignore[reportUnnecessaryComparison] - it comes from callers
            raise UsageError(f"the source is a {type(source).__name__}, expected what paceline.sources gives.")


def _path(path: Path) -> str:
    if not isinstance(path, str | PathLike):  # pyright: ignore[reportUnnecessaryIsInstance] - it comes from callers
        raise UsageError(f"{path!r} is a {type(path).__name__}, expected a path.")
    found = fspath(path)
    if not found or "\0" in found:
        raise UsageError(f"{found!r} is no path: expected the name of a file.")
    return found


def _paths(files: Paths) -> tuple[str, ...]:
    if not isinstance(files, str | PathLike | Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(f"{files!r} is a {type(files).__name__}, expected one path or pattern, or several.")
    found = (files,) if isinstance(files, str | PathLike) else tuple(files)
    if not found:
        raise UsageError("there are no files: give one path or pattern, or several.")
    return tuple(_path(path) for path in found)


def _names(names: tuple[str, ...], kind: str) -> tuple[str, ...]:
    for name in names:
        if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance] - it comes from callers
            raise UsageError(f"{name!r} is a {type(name).__name__}, expected the name of a {kind}.")
        if names.count(name) > 1:
            raise UsageError(f"the {kind} {name} is named twice: name it once.")
    return names


def _encoding(encoding: str) -> str:
    try:
        known = codecs.lookup(encoding).name
        is_single = "\r\n".encode(known).removeprefix(codecs.BOM_UTF8) == b"\r\n"
    except (LookupError, ValueError):
        raise UsageError(f"encoding is {encoding!r}, expected one that Python knows: 'utf-8' for example.") from None
    if not is_single:
        raise UsageError(
            f"encoding is {encoding!r}, expected one in which a line feed is one byte, as in UTF-8: "
            "lines are found by it."
        )
    return encoding


def _check_plain(value: object, where: str, depth: int = 0) -> None:
    if depth > _MOST_DEEP:
        raise UsageError(f"{where} has more than {_MOST_DEEP} lists and dicts in each other.")
    if isinstance(value, dict):
        for name, item in value.items():
            if not isinstance(name, str):
                raise UsageError(f"{where} has the key {name!r}, expected only str as keys.")
            _check_plain(item, where, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_plain(item, where, depth + 1)
    elif value is not None and not isinstance(value, bool | int | float | str):
        raise UsageError(
            f"{where} has a {type(value).__name__}, expected plain data, which can travel: None, bool, int, float, "
            "str, lists and dicts of these."
        )


class BatchRecipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A source, and what is done with each record of it.

    Args:
        source: made by a function of `paceline.sources`.
        transform: "module:function", which takes a record and returns one; None leaves records as they are. A parameter
            named `generator` gets a `torch.Generator` that depends on seed, epoch and index alone.
        on_error: for a record that cannot be decoded, "raise" fails the batch and "skip" leaves the record out.
        seed: of those generators.
    """

    source: Source
    transform: str | None = None
    on_error: OnError = "raise"
    seed: int = 0


_DECODER = msgspec.msgpack.Decoder(BatchRecipe)


def encode_recipe(recipe: BatchRecipe) -> bytes:
    """Return the recipe as msgpack, the same bytes for equal recipes; `decode_recipe` is the inverse."""
    return msgspec.msgpack.encode(recipe, order="sorted")


def decode_recipe(data: bytes | memoryview) -> BatchRecipe:
    """Decode a recipe of another process; opening it validates it.

    Raises:
        PeerError: the data are not a recipe.
    """
    try:
        return _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise PeerError(f"a peer sent a recipe that cannot be read (do both run the same version?): {error}") from error
