"""Stable hash: the same in every process, on every machine and in every version."""

from __future__ import annotations

from hashlib import blake2b

from paceline.errors import UsageError

Key = int | str | bytes | tuple["Key", ...]

_NUM_BYTES = 8


def fixed_hash(key: Key) -> int:
    """Return 64 bits that follow from a key alone; keys of different types have different ones.

    Raises:
        UsageError: this is no key.

    >>> hex(fixed_hash("a name"))
    '0xda5fcfabe6d6add2'
    """
    return int.from_bytes(blake2b(_encoded(key), digest_size=_NUM_BYTES).digest(), "big")


def _encoded(key: object) -> bytes:
    """Write a key so that no two are written alike: the type, the length, and what it holds."""
    match key:
        case int():
            text = b"%d" % key
            return b"i%d:%b" % (len(text), text)
        case str():
            text = key.encode("utf-8", "surrogatepass")
            return b"s%d:%b" % (len(text), text)
        case bytes():
            return b"b%d:%b" % (len(key), key)
        case tuple():
            return b"t%d:%b" % (len(key), b"".join(map(_encoded, key)))
        case _:
            raise UsageError(
                f"the key of a sample is a {type(key).__name__}, expected an int, a str, bytes or a tuple of these."
            )
