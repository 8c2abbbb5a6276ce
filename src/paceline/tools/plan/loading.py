"""Module loaded from a function in a file, on the meta device: shapes without memory."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final, TypeVar

from paceline.errors import UsageError

if TYPE_CHECKING:
    from torch.nn import Module

_IDS: Final = "ids"


@dataclass(frozen=True, slots=True)
class Sample:
    """The shape of one input without its batch, and whether it holds the ids of tokens instead of numbers."""

    shape: tuple[int, ...]
    is_ids: bool = False

    @staticmethod
    def parse(text: str) -> Sample:
        """Read `3,224,224`, or `128:ids` for the tokens of a text.

        Raises:
            UsageError: it is no shape.

        Example:
            >>> Sample.parse("128:ids")
            Sample(shape=(128,), is_ids=True)
        """
        sizes, colon, kind = text.partition(":")
        numbers = [size.strip() for size in sizes.split(",")]
        whole = all(size.isascii() and size.isdigit() and int(size) > 0 for size in numbers)
        if (colon and kind != _IDS) or not whole:
            raise UsageError(
                f"--input is '{text}', expected the sizes of one sample without the batch, such as 3,224,224, or "
                f"128:{_IDS} for tokens."
            )
        return Sample(tuple(int(size) for size in numbers), bool(colon))


_T = TypeVar("_T")
_SUFFIX: Final = ".py"


def is_place(text: str) -> bool:
    """Return whether this is meant as "file.py:function" and not as the name of a model."""
    return ":" in text or text.endswith(_SUFFIX)


def load_module(place: str) -> Module:
    """Call a function of a file, without arguments and on the meta device, and return its module.

    Args:
        place: "file.py:function".

    Raises:
        UsageError: the file cannot be loaded, it has no such function, the function fails or returns something else.
    """
    import torch

    path, _, name = place.rpartition(":")
    if not path or not name:
        raise UsageError(f"'{place}' names no function. Expected FILE.py:FUNCTION, which returns a torch.nn.Module.")
    make = getattr(_load(Path(path)), name, None)
    if not callable(make):
        raise UsageError(f"{path} has no function {name}.")
    with torch.device("meta"):
        module = attempt(f"{name} of {path} fails", make)
    if not isinstance(module, torch.nn.Module):
        raise UsageError(f"{name} of {path} returns a {type(module).__name__}, expected a torch.nn.Module.")
    return module.to("meta")


def attempt(what: str, call: Callable[[], _T]) -> _T:
    """Call what somebody else wrote; whatever it raises is told as a UsageError that begins with `what`."""
    try:
        return call()
    except (Exception, SystemExit) as error:  # nobody knows what it may raise, and it is the caller's to mend
        raise UsageError(f"{what}: {type(error).__name__}: {error}") from error


def _load(path: Path) -> ModuleType:
    """Run a file as a module of its own."""
    if not path.is_file():
        raise UsageError(f"There is no file {path}.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is no Python file; its name has to end in {_SUFFIX}.")
    module = importlib.util.module_from_spec(spec)
    loader = spec.loader
    attempt(f"{path} cannot be loaded", lambda: loader.exec_module(module))
    return module
