"""Traffic of a row table in bytes, and the bytes that it would have taken without filters."""

from __future__ import annotations

from typing import Final

import msgspec


class WireBytes(msgspec.Struct, frozen=True):
    """Traffic in one direction: exact counts, without the headers of frames.

    Args:
        frames: messages.
        key_bytes: ids, 8 bytes each.
        digest_bytes: digests that were sent instead of ids.
        value_bytes: the encoded numbers of rows.
        plain_key_bytes: the bytes of ids without filters.
        plain_value_bytes: the bytes of the numbers of rows without filters.

    Example:
        >>> WireBytes(frames=1, digest_bytes=16, value_bytes=800, plain_key_bytes=800, plain_value_bytes=800).saved
        0.49
    """

    frames: int = 0
    key_bytes: int = 0
    digest_bytes: int = 0
    value_bytes: int = 0
    plain_key_bytes: int = 0
    plain_value_bytes: int = 0

    def __add__(self, other: WireBytes) -> WireBytes:
        if other is _NOTHING:
            return self
        return WireBytes(
            self.frames + other.frames,
            self.key_bytes + other.key_bytes,
            self.digest_bytes + other.digest_bytes,
            self.value_bytes + other.value_bytes,
            self.plain_key_bytes + other.plain_key_bytes,
            self.plain_value_bytes + other.plain_value_bytes,
        )

    @property
    def total_bytes(self) -> int:
        """All bytes sent: ids, digests and numbers."""
        return self.key_bytes + self.digest_bytes + self.value_bytes

    @property
    def plain_total_bytes(self) -> int:
        """The bytes that would have been sent without filters."""
        return self.plain_key_bytes + self.plain_value_bytes

    @property
    def saved(self) -> float:
        """The share of bytes that filters saved, 0 where nothing would have been sent."""
        return _saved(self.total_bytes, self.plain_total_bytes)

    @property
    def saved_on_keys(self) -> float:
        """The share of the bytes of ids that filters saved; digests count as ids."""
        return _saved(self.key_bytes + self.digest_bytes, self.plain_key_bytes)

    @property
    def saved_on_values(self) -> float:
        """The share of the bytes of numbers that filters saved."""
        return _saved(self.value_bytes, self.plain_value_bytes)


_NOTHING: Final = WireBytes()


class RowTraffic(msgspec.Struct, frozen=True):
    """Traffic of one table in all directions.

    Args:
        pushed: gradients, from workers to servers.
        pulled: pulls and their answers: ids to the servers, values back.
        delivered: values that servers sent to subscribed workers when the clock advanced.

    Example:
        >>> first = RowTraffic(pushed=WireBytes(frames=1))
        >>> both = first + RowTraffic(pushed=WireBytes(frames=2), pulled=WireBytes(frames=3))
        >>> both.pushed.frames, both.total.frames
        (3, 6)
    """

    pushed: WireBytes = _NOTHING
    pulled: WireBytes = _NOTHING
    delivered: WireBytes = _NOTHING

    def __add__(self, other: RowTraffic) -> RowTraffic:
        return RowTraffic(self.pushed + other.pushed, self.pulled + other.pulled, self.delivered + other.delivered)

    @property
    def total(self) -> WireBytes:
        """The sum over all directions."""
        return self.pushed + self.pulled + self.delivered


def _saved(sent: int, plain: int) -> float:
    return 1.0 - sent / plain if plain else 0.0
