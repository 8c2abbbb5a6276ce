"""How fast a worker may send, and what the bytes it hands over become on the wire."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf
from typing import Final

from paceline.tensors.filters.traffic import Bytes, Traffic

# Of one frame, beside its body: the prefix and the longest header seen (the names of tables count), and what the other
# side's answer costs here, an acknowledgement by TCP.
_FRAME_BYTES: Final = 64 + 150 + 66
# Of one segment: Ethernet 14, IP 20, TCP with time stamps 32; with frames of 1500 bytes it carries 1448 of ours.
SEGMENT_BYTES: Final = 66
SEGMENT_BODY_BYTES: Final = 1448


@dataclass(slots=True)
class Pace:
    """Says when the next bytes may go, so that what is sent stays within a budget.

    What was sent is paid for afterwards, and unused time earns `credit_s` at most: enough to make up for a thread that
    wakes late. So a window of W seconds carries what the budget allows in W + `credit_s`, and one burst.

    Args:
        bytes_per_s: the budget.
        credit_s: for how much time that went unused more may be sent later.

    Example:
        >>> pace = Pace(bytes_per_s=1000.0, credit_s=0.0)
        >>> pace.pay(500, now=7.0)
        >>> pace.wait_s(now=7.0), pace.wait_s(now=8.0)
        (0.5, 0.0)
    """

    bytes_per_s: float
    credit_s: float
    _free_at: float = -inf

    def pay(self, size_bytes: int, now: float) -> None:
        """Note what was sent just now."""
        if size_bytes:
            self._free_at = max(self._free_at, now - self.credit_s) + size_bytes / self.bytes_per_s

    def wait_s(self, now: float) -> float:
        """Return the seconds until something may be sent."""
        return max(0.0, self._free_at - now)


def sent_bytes(traffic: Traffic) -> int:
    """Return what a worker has sent for this traffic, headers included; an estimate, and rather too high.

    Pushes with their ids, the ids of pulls, and acknowledgements of what came, one for two segments. Frames that are
    under way together share segments, which is not counted.

    Example:
        >>> sent_bytes(Traffic(pushed=Bytes(frames=1, key_bytes=8000, value_bytes=64000)))
        75580
    """
    came = traffic.pulled.value_bytes + traffic.delivered.key_bytes + traffic.delivered.value_bytes
    ids = Bytes(traffic.pulled.frames, traffic.pulled.key_bytes, traffic.pulled.digest_bytes)
    frames = _wire_bytes(traffic.pushed) + _wire_bytes(ids) + traffic.delivered.frames * _FRAME_BYTES
    return frames + SEGMENT_BYTES * ceil(came / (2 * SEGMENT_BODY_BYTES))


def _wire_bytes(sent: Bytes) -> int:
    """Return what frames take on the wire, as if each began a segment."""
    segments = sent.frames + sent.total_bytes // SEGMENT_BODY_BYTES
    return sent.total_bytes + sent.frames * _FRAME_BYTES + SEGMENT_BYTES * segments
