"""Numbers with units, parsed and printed: "24GB", "1.5B", "10us"."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import floor, log10
from typing import Final

from paceline.errors import UsageError

GB: Final = 1e9
MB: Final = 1e6
LEAST: Final = 1e-12
MOST: Final = 1e24  # of anything: what is made of several of them stays a number
_BILLION: Final = 1e9
_DECIMAL: Final = {"B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_BINARY: Final = {"KIB": 2.0**10, "MIB": 2.0**20, "GIB": 2.0**30, "TIB": 2.0**40}
_BYTES: Final = {**_DECIMAL, **_BINARY}
_COUNTS: Final = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
_SECONDS: Final = {"S": 1.0, "MS": 1e-3, "US": 1e-6, "NS": 1e-9}
_NUMBER: Final = re.compile(r"([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)")


def parse_bytes(text: str, what: str) -> float:
    """Read a size such as 24GB (24 × 10⁹ bytes) or 16GiB.

    Args:
        text: the number and its unit, in any case.
        what: the name of the option, for the message.

    Raises:
        UsageError: the text is not a positive number with a unit of bytes.

    Example:
        >>> parse_bytes("1.5GB", "--device")
        1500000000.0
    """
    return _parse(text, what, _BYTES, "a size with its unit, such as 24GB or 16GiB")


def parse_count(text: str, what: str) -> float:
    """Read a number such as 340M, 1.5B (10⁹) or 175e9.

    Raises:
        UsageError: the text is not a positive number.

    Example:
        >>> parse_count("0.32B", "--parameters")
        320000000.0
    """
    return _parse(text, what, _COUNTS, "a number such as 340M or 1.5B")


def parse_seconds(text: str, what: str) -> float:
    """Read a time such as 10us.

    Raises:
        UsageError: the text is not a positive number with a unit of time.
    """
    return _parse(text, what, _SECONDS, "a time with its unit, such as 10us or 0.5ms")


def three_digits(number: float) -> str:
    """Write a number with three significant digits, or all those before the point.

    Example:
        >>> [three_digits(number) for number in (5.12, 24.0, 275.2, 2800.0, 0.0)]
        ['5.12', '24', '275', '2800', '0']
    """
    if number == 0:
        return "0"
    decimals = max(0, 2 - floor(log10(abs(number))))
    text = f"{number:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def in_gb(size_bytes: float) -> str:
    """Write a size as "5.12 GB"."""
    return f"{three_digits(size_bytes / GB)} GB"


def in_bytes(size_bytes: float) -> str:
    """Write a size in the unit that suits it: "84 MB", "5.12 GB"."""
    return in_gb(size_bytes) if size_bytes >= GB or size_bytes == 0 else f"{three_digits(size_bytes / MB)} MB"


def in_seconds(seconds: float) -> str:
    """Write a time in the unit that suits it: "84 ms", "5.12 s"."""
    if seconds >= 1 or seconds == 0:
        return f"{three_digits(seconds)} s"
    return f"{three_digits(seconds * 1e3)} ms" if seconds >= 1e-3 else f"{three_digits(seconds * 1e6)} us"


def in_billions(count: float) -> str:
    """Write a number of parameters as "0.32 B"."""
    return f"{three_digits(count / 1e9)} B"


def in_count(count: float) -> str:
    """Write a number of parameters in the unit that suits it: "3.32 M", "1.5 B"."""
    return in_billions(count) if count >= _BILLION else f"{three_digits(count / 1e6)} M"


def _parse(text: str, what: str, units: Mapping[str, float], expected: str) -> float:
    found = _NUMBER.fullmatch(text.strip())
    factor = units.get(found[2].upper()) if found else None
    value = float(found[1]) * factor if found and factor else 0.0
    if value == 0:
        raise UsageError(f"{what} is '{text}', expected {expected}.")
    if not LEAST <= value <= MOST:
        raise UsageError(f"{what} is '{text}', expected {expected}, from {LEAST:g} to {MOST:g}.")
    return value
