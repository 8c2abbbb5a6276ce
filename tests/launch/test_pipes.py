"""Bytes in, whole lines out."""

import os

import pytest

from paceline.launch.output import LINE_BYTES_MAX, LineBuffer, Pipe, Pump


@pytest.mark.parametrize(
    ("chunks", "lines"),
    [
        ([b"one\ntwo\n"], ["one", "two"]),
        ([b"o", b"ne", b"\n", b"two"], ["one", "two"]),
        ([b"\n\n"], ["", ""]),
        ([b"windows\r\n"], ["windows"]),
        ([b" 1%\r 2%\r", b"done\n"], ["done"]),
        ([b"caf\xc3", b"\xa9\n"], ["café"]),
        ([b"\xff\n"], ["\udcff"]),
        ([b"x" * (LINE_BYTES_MAX + 1), b"y\n"], ["x" * (LINE_BYTES_MAX + 1), "y"]),
        ([], []),
    ],
)
def test_lines(chunks: list[bytes], lines: list[str]) -> None:
    told: list[str] = []
    buffer = LineBuffer(told.append)

    for chunk in chunks:
        buffer.feed(chunk)
    buffer.finish()

    assert told == lines


def test_the_pump_reads_what_is_there_and_forgets_a_closed_pipe() -> None:
    wakeup_reader, wakeup_writer = os.pipe()
    reader, writer = os.pipe()
    told: list[str] = []
    pipe = Pipe(os.fdopen(reader, "rb", buffering=0), told.append)
    pump = Pump(wakeup_reader)
    pump.add(pipe)

    os.write(writer, b"hello\nrest")
    pump.wait(30.0)
    assert told == ["hello"]

    os.close(writer)
    pump.wait(30.0)  # sees the end
    os.write(wakeup_writer, b"!")
    pump.wait(30.0)  # only the signal is left to wake for
    pump.remove(pipe)
    assert told == ["hello", "rest"]
    assert pipe.file.closed

    os.close(wakeup_reader)
    os.close(wakeup_writer)


def test_a_process_that_kept_the_pipe_cannot_hold_us(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    pipe = Pipe(os.fdopen(reader, "rb", buffering=0), lambda _: None)
    chunks: list[int] = []
    monkeypatch.setattr(os, "read", lambda _fd, size: chunks.append(size) or b"again\n")

    pipe.finish()

    assert 0 < len(chunks) < 1000
    os.close(writer)
