"""Declared sources of training examples, and batch recipes, as plain data. They are opened where batches are made.

Paths are relative to the working folder of the job, which all its processes share. With data servers, the data servers
read the files. A pattern such as `shards/*.tar` stands for the files that match it, sorted by name.

Each source defines its records. Records are collated into batches as by torch's `default_collate`.

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
from os import PathLike, fsencode, fspath
from typing import Any, Final, Literal, TypeAlias, cast

import msgspec

from paceline.core.calls import checked, shown
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
    """Base of sources with many files: `repr` shows their number."""

    def __repr__(self) -> str:
        told = (f"{name}={_counted(getattr(self, name))}" for name in self.__struct_fields__)
        return f"{type(self).__name__}({', '.join(told)})"


def _counted(value: object) -> str:
    if isinstance(value, tuple | dict) and len(cast("tuple[object, ...]", value)) > 1:
        return f"<{len(cast('tuple[object, ...]', value))}>"
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


class Arrays(_Listed, frozen=True, forbid_unknown_fields=True, tag="arrays"):
    """NumPy arrays. A record is a dict with `names`, else a tuple of tensors, or a single tensor."""

    arrays: tuple[ArrayFile, ...]
    names: tuple[str, ...] | None = None


class Tensors(_Listed, frozen=True, forbid_unknown_fields=True, tag="tensors"):
    """Tensors of a safetensors file. A record is a tuple of tensors, or a single tensor."""

    path: str
    names: tuple[str, ...]


class Lines(_Listed, frozen=True, forbid_unknown_fields=True, tag="lines"):
    """Lines of text files: bytes if `encoding` is None."""

    paths: tuple[str, ...]
    encoding: str | None


class Parquet(_Listed, frozen=True, forbid_unknown_fields=True, tag="parquet"):
    """Rows of Parquet files, with all columns if `columns` is None."""

    paths: tuple[str, ...]
    columns: tuple[str, ...] | None


class WebDataset(_Listed, frozen=True, forbid_unknown_fields=True, tag="webdataset"):
    """Samples of tar files."""

    paths: tuple[str, ...]


class OwnDataset(_Listed, frozen=True, forbid_unknown_fields=True, tag="dataset"):
    """A dataset of the user, and the arguments that build it."""

    path: str
    arguments: dict[str, Any]


Source: TypeAlias = Arrays | Tensors | Lines | Parquet | WebDataset | OwnDataset


def arrays(file: Path | None = None, /, *members: str, **named: Path) -> Arrays:
    """Return the source of NumPy arrays whose first dimension counts the samples.

    Files are mapped into memory. Compressed members of an .npz file are read when the source is opened.

    Args:
        file: an .npz file, or a single .npy file.
        members: arrays of the .npz file. A record is a tuple of tensors in this order, or one tensor for one member.
        named: .npy files by name, in place of `file`. A record is a dict of tensors.

    Raises:
        UsageError: both or neither of file and names are given, or an .npz file without members.

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


@checked
def tensors(file: Path, *names: str) -> Tensors:
    """Return the source of tensors of a safetensors file whose first dimension counts the samples.

    The file is mapped into memory. A record is a tuple of tensors in the order of names, or one tensor for one name.

    Raises:
        UsageError: no name is given.

    Example:
        >>> tensors("digits.safetensors", "images", "labels").names
        ('images', 'labels')
    """
    if not names:
        raise UsageError(f"tensors({_path(file)!r}) does not say which tensors: name at least one.")
    return Tensors(_path(file), _names(names, "tensor"))


@checked
def lines(files: Paths, *, encoding: str = "utf-8", binary: bool = False) -> Lines:
    r"""Return the source of the lines of text files. A record is a str without its line feed.

    Opening the files finds the start of each line once, and keeps 8 bytes of memory a line.

    Args:
        files: one path or pattern, or several.
        encoding: of the text, with a line feed of one byte, as in UTF-8. "utf-8-sig" removes a byte order mark at the
            beginning of a file; with other encodings the mark is part of the first line.
        binary: return lines as bytes and ignore the encoding.

    Raises:
        UsageError: no files, an unknown encoding, or one in which a line feed is not one byte.

    Example:
        >>> lines("books/*.txt", encoding="latin-1")
        Lines(paths=('books/*.txt',), encoding='latin-1')
    """
    return Lines(_paths(files), None if binary else _encoding(encoding))


@checked
def parquet(files: Paths, *, columns: Sequence[str] | None = None) -> Parquet:
    """Return the source of the rows of Parquet files. A record is a dict of numbers, arrays, str and bytes.

    Processes that make batches need `pip install 'paceline[data]'`. A read of one row decodes its row group, and the
    latest groups are kept. For shuffled samples, write small row groups.

    Args:
        files: one path or pattern, or several; all files have the same columns.
        columns: names of columns in the order of the record; None for all.

    Raises:
        UsageError: no files, or an empty list of columns.

    Example:
        >>> parquet("clicks/*.parquet", columns=["user", "item", "clicked"]).columns
        ('user', 'item', 'clicked')
    """
    if columns is not None and (not isinstance(columns, list | tuple) or not columns):
        raise UsageError(f"columns is {shown(columns)}, expected a list of names, or None for all columns.")
    return Parquet(_paths(files), None if columns is None else _names(tuple(columns), "column"))


@checked
def webdataset(files: Paths) -> WebDataset:
    """Return the source of the samples of tar files in WebDataset format.

    A sample is a run of files whose names are equal up to the first dot. A record is a dict from the rest of each name
    to the content as bytes, and from "__key__" to the common part. Decode the bytes by a transform. The tar files must
    not be compressed. Opening them finds the position of each file once.

    Raises:
        UsageError: no files.

    Example:
        >>> webdataset("shards/train-*.tar")
        WebDataset(paths=('shards/train-*.tar',))
    """
    return WebDataset(_paths(files))


@checked
def dataset(path: str, /, **arguments: Plain) -> OwnDataset:
    """Return the source of your own dataset. Processes that make batches build it.

    Args:
        path: "module:name" of a function or class that returns an object with `__len__` and `__getitem__`, for example
            a `torch.utils.data.Dataset` or a list. An item must depend on its index alone.
        arguments: keyword arguments of the call, as plain data.

    Raises:
        UsageError: the path is not valid, or an argument is not plain data.

    Example:
        >>> dataset("my_package.data:Images", folder="train", size=224).arguments
        {'folder': 'train', 'size': 224}
    """
    split_path(path, "dataset")
    for name, value in arguments.items():
        _check_plain(value, f"argument {name} of {path}")
    return OwnDataset(path, dict(arguments))


def check_source(source: Source) -> None:
    """Validate a source from another process; raises UsageError."""
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
    if not found or "\0" in found or not _can_be_encoded(found):
        raise UsageError(f"{shown(found)} is not a path: expected the name of a file.")
    return found


def _can_be_encoded(path: str) -> bool:
    try:
        fsencode(path)
    except UnicodeEncodeError:
        return False
    return True


def _paths(files: Paths) -> tuple[str, ...]:
    if not isinstance(files, str | PathLike | Iterable) or hasattr(files, "dtype"):  # pyright: ignore[reportUnnecessaryIsInstance]
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
    """A source, and the transform of each of its records.

    Args:
        source: made by a function of `paceline.sources`.
        transform: "module:function" from a record to a record; None for none. A parameter named `generator` gets a
            `torch.Generator` that depends on seed, epoch and index alone.
        on_error: "raise" fails the batch of a record that cannot be decoded, "skip" leaves the record out.
        seed: of the generators.
    """

    source: Source
    transform: str | None = None
    on_error: OnError = "raise"
    seed: int = 0


_DECODER = msgspec.msgpack.Decoder(BatchRecipe)


def encode_recipe(recipe: BatchRecipe) -> bytes:
    """Return the recipe as msgpack, with the same bytes for equal recipes."""
    return msgspec.msgpack.encode(recipe, order="sorted")


def decode_recipe(data: bytes | memoryview) -> BatchRecipe:
    """Decode the recipe of another process. It is validated when it is opened.

    Raises:
        PeerError: the data are not a recipe.
    """
    try:
        return _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise PeerError(f"a peer sent a recipe that cannot be read (do both run the same version?): {error}") from error
