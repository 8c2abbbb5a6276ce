"""When the kernel is told to give a connection up: by what was last heard, however late something was sent."""

import socket
import struct

import pytest

from paceline.transport import channel as silence
from paceline.transport.channel import SILENCE_S, SilenceLimit
from paceline.transport.tcp import KEEPALIVE_AFTER_S, KEEPALIVE_EVERY_S, NUM_KEEPALIVES


class Line:
    """A socket as far as `SilenceLimit` asks: with what the kernel knows of its connection."""

    def __init__(self) -> None:
        self.user_timeout_ms = 0
        self.retransmits = self.probes = 0
        self.data_ago_ms = self.ack_ago_ms = 0

    def getsockopt(self, _level: int, option: int, size: int) -> bytes:
        assert option == socket.TCP_INFO
        info = bytearray(struct.pack("2xBB", self.retransmits, self.probes).ljust(size, b"\0"))
        info[52:60] = struct.pack("II", self.data_ago_ms, self.ack_ago_ms)
        return bytes(info)

    def setsockopt(self, _level: int, option: int, value: int) -> None:
        assert option == socket.TCP_USER_TIMEOUT
        self.user_timeout_ms = value


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> Line:
    monkeypatch.setattr(silence, "_PAUSE_S", 0.0)
    return Line()


@pytest.mark.parametrize(("heard_ms", "left_ms"), [(0, 11_000), (4_000, 7_000), (10_000, 1_000), (15_000, 1_000)])
def test_what_is_sent_late_in_a_silence_does_not_make_it_longer(line: Line, heard_ms: int, left_ms: int) -> None:
    watch = SilenceLimit(line)  # type: ignore[arg-type]
    line.retransmits, line.ack_ago_ms, line.data_ago_ms = 1, heard_ms, heard_ms + 60_000

    watch.check()

    assert line.user_timeout_ms == left_ms
    line.retransmits, line.ack_ago_ms = 2, heard_ms + 500
    watch.check()
    assert line.user_timeout_ms == left_ms, "the kernel counts from what was sent first"
    line.retransmits = 0
    watch.check()
    assert line.user_timeout_ms == 0, "the other end has answered"


def test_the_kernel_gives_up_as_early_where_nothing_is_sent() -> None:
    assert KEEPALIVE_AFTER_S + KEEPALIVE_EVERY_S * NUM_KEEPALIVES == SILENCE_S
