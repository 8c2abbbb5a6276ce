"""Files that say how a script is run: options of `paceline run`, and arguments of the script."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Final

import msgspec
from msgspec import json as as_json
from msgspec import toml as as_toml
from msgspec import yaml as as_yaml

from paceline.errors import UsageError

Choice = bool | int | float | str
ARGS: Final = "args"
_YAML_PLACE: Final = re.compile(r'\s+in "<byte string>", (.+)')

_FORMATS: Final[Mapping[str, ModuleType]] = {
    ".toml": as_toml,
    ".yaml": as_yaml,
    ".yml": as_yaml,
    ".json": as_json,
}


class RunConfig(msgspec.Struct, frozen=True):
    """What such a file holds: options without their dashes, as `workers` or `on-crash`, and what the script gets."""

    options: Mapping[str, Choice]
    args: tuple[str, ...] = ()

    def to_toml(self, note: str) -> str:
        r"""Write it as a file with a comment on top.

        Example:
            >>> print(RunConfig({"workers": 2, "strategy": "ssp:3"}, ("--lr=0.1",)).to_toml("The best of 30."), end="")
            # The best of 30.
            workers = 2
            strategy = "ssp:3"
            args = [
              "--lr=0.1",
            ]
        """
        options = [f"{name} = {_toml(value)}" for name, value in self.options.items()]
        args = [f"{ARGS} = [", *(f"  {_toml(arg)}," for arg in self.args), "]"] if self.args else []
        return "\n".join([*(f"# {line}" for line in note.splitlines()), *options, *args, ""])


def read_mapping(path: Path) -> dict[str, object]:
    """Read a file of TOML, YAML or JSON, as its name says.

    Raises:
        UsageError: it is not there, is none of these, cannot be read, or holds no names with values.
    """
    format_of = _FORMATS.get(path.suffix.lower())
    if format_of is None:
        raise UsageError(f"{path}: expected a file whose name ends in {', '.join(_FORMATS)}")
    try:
        data = path.read_bytes()
        found = format_of.decode(data)
        twice = _duplicate_key(data, format_of)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except ImportError as error:
        raise UsageError(
            f"{path}: reading YAML needs PyYAML, not installed here: pip install 'paceline[tune]', or write it as TOML"
        ) from error
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError: a day that no month has
        raise UsageError(f"{path} cannot be read: {_in_one_line(error)}") from error
    if twice:
        raise UsageError(f"{path}: {twice}: only one of them would count, name it once")
    if found is None:
        raise UsageError(f"{path} is empty, expected names with values")
    if not isinstance(found, dict):
        raise UsageError(f"{path}: expected names with values, got {found!r:.100}")
    for name in found:
        if not isinstance(name, str):
            raise UsageError(f"{path}: expected names with values, got the name {name!r}: put it in quotes")
    return found


def _in_one_line(error: Exception) -> str:
    r"""Return what a parser has found; that of YAML says it in several lines, each with a place in a file without name.

    >>> _in_one_line(ValueError('while parsing\n  in "<byte string>", line 1, column 4\nfound no end'))
    'while parsing (line 1, column 4), found no end'
    """
    found = _YAML_PLACE.sub(r" (\1)", str(error)).replace("\n", ", ")
    return found.replace("that cannot start any token", "that cannot start any token, such as a tab")


def _duplicate_key(data: bytes, format_of: ModuleType) -> str:
    """Return a name that stands twice in one mapping of a file, "" for none: parsers other than TOML take the last."""
    if format_of is as_yaml:
        return _duplicate_yaml_key(data)
    found: list[str] = []

    def look(pairs: list[tuple[str, object]]) -> dict[str, object]:
        names = [name for name, _ in pairs]
        found.extend(name for name in set(names) if names.count(name) > 1)
        return dict(pairs)

    if format_of is as_json:
        json.loads(data, object_pairs_hook=look)
    return f"'{found[0]}' is there twice" if found else ""


def _duplicate_yaml_key(data: bytes) -> str:
    import yaml

    nodes, seen = [yaml.compose(data, Loader=yaml.SafeLoader)], set[int]()
    while nodes:
        node = nodes.pop()
        if id(node) in seen:  # what an alias stands for
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            nodes += node.value
        elif isinstance(node, yaml.MappingNode):
            lines: dict[str, int] = {}
            for key, value in node.value:
                line = key.start_mark.line + 1
                if isinstance(key, yaml.ScalarNode):
                    if key.value in lines:
                        return f"'{key.value}' is there twice, in lines {lines[key.value]} and {line}"
                    lines[key.value] = line
                nodes.append(value)
    return ""


def read_config(path: Path) -> RunConfig:
    """Read a file for `paceline run --config`: options by their names, and `args` as a list or as names with values.

    Whether there are such options is checked where they are used.

    Raises:
        UsageError: it cannot be read, or a value is neither text, a number nor a truth value.
    """
    found = read_mapping(path)
    try:
        args = msgspec.convert(found.pop(ARGS, ()), tuple[Choice, ...] | dict[str, Choice])
        options = msgspec.convert(found, dict[str, Choice])
    except msgspec.ValidationError as error:
        raise UsageError(
            f"{path}: {error}; an option has one value, and {ARGS} is a list, or names with values"
        ) from error
    named = {option_name(name): value for name, value in options.items()}
    twice = [name for name in options if name != option_name(name) in options]
    if twice:
        raise UsageError(f"{path}: '{twice[0]}' and '{option_name(twice[0])}' are one option: name it once")
    told = flags(args) if isinstance(args, dict) else [as_text(arg) for arg in args]
    return RunConfig(named, tuple(told))


def option_name(name: str) -> str:
    """Return a name as options are written.

    >>> option_name("grace_s")
    'grace-s'
    """
    return name.replace("_", "-")


def flags(values: Mapping[str, Choice]) -> Sequence[str]:
    """Return names and values as arguments of a script: True without a value, False left out.

    >>> flags({"lr": 0.001, "batch": 32, "amp": True, "shuffle": False})
    ['--lr=0.001', '--batch=32', '--amp']
    """
    return [
        f"--{name}" if value is True else f"--{name}={as_text(value)}"
        for name, value in values.items()
        if value is not False
    ]


def as_text(value: Choice) -> str:
    """Return a value as it is written on a command line.

    >>> as_text(True), as_text(1e-05), as_text("ssp:3")
    ('true', '1e-05', 'ssp:3')
    """
    return str(value).lower() if isinstance(value, bool) else str(value)


def _toml(value: Choice) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return as_text(value)
