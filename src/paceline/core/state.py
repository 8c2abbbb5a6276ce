"""The state of a core as plain values, and back: a process that restores it is the same server from there on.

A state is a tree of values (msgspec structs), dataclasses, containers, numbers and texts. Every field counts, so that
none can be forgotten.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Final, Generic, TypeVar, cast, final, get_args, get_type_hints

import msgspec

from paceline.errors import ProtocolBug

T = TypeVar("T")

Plain = None | bool | int | float | str | bytes | list["Plain"]

_CONTAINERS: Final[Mapping[str, type]] = {"tuple": tuple, "list": list, "set": set}
_MAPS: Final[Mapping[str, type]] = {"dict": dict, "Counter": Counter}
_BYTES: Final = "memoryview"
_AGAIN: Final = "again"


@final
class StateCodec(Generic[T]):
    """Writes objects of one class as plain values, and reads these.

    An object is a list: the name of its class, then its fields, or its entries. One that occurs again is a reference to
    the first occurrence, so that it is one object again.

    Args:
        root: a dataclass or struct. The classes of what its fields hold are found by their annotations.
        leaves_out: fields of the root that are not part of the state.

    Example:
        >>> from paceline.core.membership import Clocks
        >>> codec = StateCodec(Clocks)
        >>> clocks = Clocks()
        >>> clocks.add(3)
        0
        >>> codec.dump(clocks)
        ['Clocks', ['dict', 3, 0], 0, ['dict', 0, 1]]
        >>> codec.load(codec.dump(clocks)) == clocks
        True
    """

    def __init__(self, root: type[T], leaves_out: Collection[str] = ()) -> None:
        self._root = root
        self._left_out = frozenset(leaves_out)
        self._names: dict[type, tuple[str, ...]] = {}
        self._classes: dict[str, type] = {}
        self._find(root)

    def dump(self, state: T) -> Plain:
        """Return a state as plain values, which share nothing with it."""
        return self._dump(state, {})

    def load(self, plain: Plain) -> T:
        """Return the state that these values describe; raises ProtocolBug for values that describe none."""
        state = self._load(plain, [])
        if not isinstance(state, self._root):
            raise ProtocolBug(f"the state of a {self._root.__name__} was expected, got a {type(state).__name__}")
        return state

    def load_into(self, target: T, plain: Plain) -> None:
        """Replace the state of an object; fields in `leaves_out` stay as they are. Raises as `load` does."""
        state = self.load(plain)
        for name in self._names[self._root]:
            setattr(target, name, getattr(state, name))

    def _find(self, hint: object) -> None:
        """Note the classes with fields that an annotation names, and those that these name."""
        for part in get_args(hint):
            self._find(part)
        if isinstance(hint, type) and hint not in self._names and (names := _field_names(hint)) is not None:
            self._note(hint, names)

    def _note(self, kind: type, names: tuple[str, ...]) -> None:
        """Note a class with these fields, those that they name, and those that inherit from it."""
        if self._classes.setdefault(kind.__name__, kind) is not kind:
            raise ProtocolBug(f"two classes of a state are called {kind.__name__}: give one another name")
        left_out = self._left_out if kind is self._root else frozenset[str]()
        self._names[kind] = tuple(name for name in names if name not in left_out)
        hints = get_type_hints(kind)
        for name in self._names[kind]:
            self._find(hints[name])
        # By name: a dataclass with slots is a copy of the class that it was written as, which lives on beside it.
        for inheriting in {each.__name__: each for each in kind.__subclasses__()}.values():
            self._find(inheriting)

    def _dump(self, value: object, known: dict[int, int]) -> Plain:
        """Return a value as plain ones; `known`: by the identity of each object so far, its number."""
        if value is None or isinstance(value, bool | int | float | str | bytes):
            return value
        kind = type(value)
        if kind in self._names:
            if id(value) in known:
                return [_AGAIN, known[id(value)]]
            known[id(value)] = len(known)
            return [kind.__name__, *(self._dump(getattr(value, name), known) for name in self._names[kind])]
        if isinstance(value, memoryview):
            return [_BYTES, bytes(value)]
        if kind.__name__ in _CONTAINERS:
            entries = cast("Iterable[object]", value)
            entries = sorted(entries, key=repr) if kind is set else entries
            return [kind.__name__, *(self._dump(entry, known) for entry in entries)]
        if kind.__name__ in _MAPS:
            pairs = cast("dict[object, object]", value).items()
            return [kind.__name__, *(self._dump(part, known) for pair in pairs for part in pair)]
        raise ProtocolBug(f"a {kind.__name__} has no place in the state of a {self._root.__name__}")

    def _load(self, plain: Plain, known: list[object]) -> object:
        """Return the value that plain ones describe; `known`: the objects so far."""
        if not isinstance(plain, list):
            return plain
        name = plain[0]
        if name == _AGAIN:
            return known[cast("int", plain[1])]
        if isinstance(name, str) and name in self._classes:
            return self._load_object(self._classes[name], plain[1:], known)
        parts = [self._load(part, known) for part in plain[1:]]
        if name == _BYTES and isinstance(parts[0], bytes):
            return memoryview(parts[0])
        if name in _CONTAINERS:
            return _CONTAINERS[name](parts)
        if name in _MAPS:
            return _MAPS[name](dict(zip(parts[::2], parts[1::2], strict=True)))  # a Counter would count the pairs
        raise ProtocolBug(f"the state of a {self._root.__name__} has a part of unknown kind {name!r}")

    def _load_object(self, kind: type, parts: list[Plain], known: list[object]) -> object:
        """Return the object whose fields these values describe, and note it in the place of its first occurrence."""
        number, names = len(known), self._names[kind]
        if issubclass(kind, msgspec.Struct):  # a value, of which no part can be the whole
            known.append(None)
            known[number] = kind(**{name: self._load(part, known) for name, part in zip(names, parts, strict=True)})
        else:
            known.append(state := object.__new__(kind))
            for name, part in zip(names, parts, strict=True):
                object.__setattr__(state, name, self._load(part, known))
        return known[number]


def _field_names(kind: type) -> tuple[str, ...] | None:
    """Return the fields of a struct or dataclass; None of another class."""
    if issubclass(kind, msgspec.Struct):
        return kind.__struct_fields__
    return tuple(field.name for field in fields(kind)) if is_dataclass(kind) else None
