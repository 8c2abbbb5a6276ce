"""User-defined datasets and transforms, named by import path."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Protocol, runtime_checkable

from paceline.data.sources.declared import OwnDataset
from paceline.errors import PacelineError, UsageError
from paceline.update.user_code import member_at


@runtime_checkable
class _MapStyle(Protocol):
    """The methods that a dataset needs."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> object: ...


class DatasetSamples:
    """The samples of an object with a length and items."""

    def __init__(self, source: OwnDataset, allowed: AbstractSet[str] | None) -> None:
        self._source = source
        self._dataset = _build(source, allowed)
        self._num_samples = len(self._dataset)

    @property
    def num_samples(self) -> int:
        """Length of the dataset when it was built."""
        return self._num_samples

    def gather(self, indices: Sequence[int]) -> None:
        """Return None: records are read one by one."""

    def record(self, index: int) -> object:
        """Return one record of the dataset."""
        return self._dataset[index]

    def name(self, index: int) -> str:
        """Return the name of a record."""
        return f"record {index} of {self._source.path}"

    def check(self) -> None:
        """Do nothing: the files of a dataset are not known."""

    def describe(self) -> object:
        """Return path, arguments and length of the dataset."""
        return [self._source.path, self._source.arguments, self._num_samples]

    def close(self) -> None:
        """Do nothing: a dataset ends with the last reference to it."""


def _build(source: OwnDataset, allowed: AbstractSet[str] | None) -> _MapStyle:
    make = _callable_at(source.path, allowed, "dataset")
    try:
        made = make(**source.arguments)
    except PacelineError:
        raise
    except Exception as error:
        raise UsageError(
            f"the dataset {source.path} could not be built with {source.arguments}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(made, _MapStyle):
        raise UsageError(
            f"{source.path} gave a {type(made).__name__}, expected an object with __len__ and __getitem__: samples "
            "are read in any order, so an object that can only be iterated is not supported."
        )
    return made


def transform_at(path: str, allowed: AbstractSet[str] | None) -> tuple[Callable[..., object], bool]:
    """Return the transform at an import path, and whether it takes a generator.

    Raises:
        UsageError: the transform may not be loaded, cannot be imported or is not callable.
    """
    transform = _callable_at(path, allowed, "transform")
    try:
        takes_generator = "generator" in inspect.signature(transform).parameters
    except ValueError:  # some callables of C have no signature
        takes_generator = False
    return transform, takes_generator


def _callable_at(path: str, allowed: AbstractSet[str] | None, kind: str) -> Callable[..., Any]:
    found = member_at(path, allowed, kind)
    if not callable(found):
        module_name, _, member = path.partition(":")
        raise UsageError(f"Module {module_name} has no function {member}, which the {kind} {path} names.")
    return found
