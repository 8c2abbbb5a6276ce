"""What the launcher writes: bytes as they came, to readers that are slow, gone or were never there."""

import ast
import fcntl
import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.launch import launching
from tests.launch.launching import TIMEOUT_S, command, write_script

from paceline.launch import output
from paceline.launch.output import MAX_WAITING_BYTES, Outlet

PIPE_BYTES = 4096


@pytest.fixture
def pipe() -> Iterator[tuple[io.TextIOWrapper, io.FileIO]]:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    with os.fdopen(writer, "w") as stream, io.FileIO(reader) as end:
        yield stream, end


def test_what_a_reader_does_not_take_waits_and_leaves_in_order(pipe: tuple[io.TextIOWrapper, io.FileIO]) -> None:
    stream, reader = pipe
    stream.write("before ")  # what the stream itself holds comes first
    outlet = Outlet(stream)
    outlet.write("x" * (3 * PIPE_BYTES) + "\n")
    assert outlet.waiting_bytes > PIPE_BYTES
    assert not outlet.is_full
    heard = b""
    while outlet.waiting_bytes:
        heard += reader.read(PIPE_BYTES)
        outlet.push()
    heard += reader.read(PIPE_BYTES)
    assert heard == b"before " + b"x" * (3 * PIPE_BYTES) + b"\n"


def test_bytes_leave_as_they_came(pipe: tuple[io.TextIOWrapper, io.FileIO]) -> None:
    stream, reader = pipe
    said = bytes(range(1, 256))
    Outlet(stream).write(said.decode(errors="surrogateescape"))
    assert reader.read(PIPE_BYTES) == said


def test_several_threads_write_and_each_line_leaves_once(pipe: tuple[io.TextIOWrapper, io.FileIO]) -> None:
    stream, reader = pipe
    os.set_blocking(reader.fileno(), False)
    outlet = Outlet(stream)
    written = [[f"{writer} {number}" for number in range(2000)] for writer in range(4)]

    def write(lines: list[str]) -> None:
        for line in lines:
            outlet.write(f"{line}\n")

    heard = bytearray()
    with ThreadPoolExecutor(len(written)) as threads:
        writing = [threads.submit(write, lines) for lines in written]
        while outlet.waiting_bytes or not all(done.done() for done in writing) or heard.count(b"\n") < 8000:
            outlet.push()
            heard += reader.read(PIPE_BYTES) or b""
    for done in writing:
        done.result()
    assert sorted(heard.decode().splitlines()) == sorted(line for lines in written for line in lines)


def test_a_reader_that_never_comes_back_is_given_up_and_what_it_missed_is_counted(
    pipe: tuple[io.TextIOWrapper, io.FileIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "DRAIN_TIMEOUT_S", 0.05)
    outlet = Outlet(pipe[0])
    outlet.write("x" * (2 << 20) + "\n")
    assert outlet.is_full
    outlet.write("y" * MAX_WAITING_BYTES)
    assert outlet.waiting_bytes <= 2 << 20  # what is kept is bounded
    assert outlet.drain() == outlet.waiting_bytes + MAX_WAITING_BYTES


def test_a_reader_that_is_gone_and_one_that_was_never_there_hold_nothing_up(
    pipe: tuple[io.TextIOWrapper, io.FileIO],
) -> None:
    stream, reader = pipe
    outlet = Outlet(stream)
    reader.close()
    for closed in (outlet, Outlet(None)):
        closed.write("not read\n")
        assert (closed.waiting_bytes, closed.drain()) == (0, 0)
        assert not closed.isatty()


def run(folder: Path, text: str, *prefix: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    words = [*prefix, *command(write_script(folder, text), {"num_workers": 1})]
    return subprocess.run(words, capture_output=True, timeout=TIMEOUT_S, env={**os.environ, **variables}, check=False)


@pytest.mark.parametrize(
    "variables",
    [{"PYTHONIOENCODING": "latin-1"}, {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}],
    ids=["latin-1", "C"],
)
def test_output_of_any_encoding_ends_no_run(tmp_path: Path, variables: dict[str, str]) -> None:
    said = "caf\u00e9".encode("latin-1") + b" \xff\xfe\x80"
    done = run(tmp_path, f"sys.stdout.buffer.write({said!r} + b'\\n'); sys.exit('\u00e9')", **variables)
    assert done.returncode == 1
    assert b"[worker 0] " + said + b"\n" in done.stdout
    assert b"[worker 0] " in done.stderr


def test_a_closed_standard_output_ends_no_run(tmp_path: Path) -> None:
    done = run(tmp_path, "print('to no reader'); sys.exit(3)", "sh", "-c", 'exec "$0" "$@" >&-')
    assert done.returncode == 3
    assert done.stdout == b""
    assert b"Traceback" not in done.stderr


OPENS = """
import os, sys
from paceline.launch.output import occupy_closed_streams
occupy_closed_streams()
os.write(os.open(sys.argv[1], os.O_WRONLY), str(os.pipe()).encode())
"""


def test_a_full_disk_under_standard_output_is_told_once_on_the_other_stream(
    monkeypatch: pytest.MonkeyPatch, pipe: tuple[io.TextIOWrapper, io.FileIO]
) -> None:
    stream, reader = pipe
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        monkeypatch.setattr(sys, "stderr", stream)
        with output.unblocked_output() as outlets:
            for _ in range(3):
                outlets.stdout.write("a line of the job\n")
    told = reader.read(PIPE_BYTES).decode().splitlines()
    assert told == [
        "paceline: standard output takes nothing any more (No space left on device): what the job prints is lost from "
        "here on; the run goes on"
    ]


def test_no_file_gets_the_number_of_a_stream_that_was_closed(tmp_path: Path) -> None:
    (tmp_path / "told").touch()
    words = ["sh", "-c", 'exec "$0" "$@" <&- >&- 2>&-', sys.executable, "-c", OPENS, str(tmp_path / "told")]
    subprocess.run(words, check=True, timeout=TIMEOUT_S)
    assert min(ast.literal_eval((tmp_path / "told").read_text())) > 2


def show(ending: str, *words: str | Path, **variables: str) -> subprocess.CompletedProcess[bytes]:
    """Run the command line in a shell, with an ending of its line."""
    line = ["sh", "-c", f'exec "$0" -m paceline "$@" {ending}', sys.executable, *map(str, words)]
    return subprocess.run(line, capture_output=True, timeout=TIMEOUT_S, env={**os.environ, **variables}, check=False)


def test_a_command_whose_output_is_closed_does_its_work() -> None:
    done = show("<&- >&-", "launch", "--emit", "slurm", "train.py")
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_reader_that_is_gone_is_not_told_of_and_a_full_disk_is_told_once() -> None:
    gone, other = os.pipe()
    os.close(gone)
    words = [sys.executable, "-m", "paceline", "launch", "--emit", "slurm", "train.py"]
    done = subprocess.run(words, stdout=other, stderr=subprocess.PIPE, timeout=TIMEOUT_S, check=False)
    os.close(other)
    assert (done.returncode, done.stderr) == (1, b"")
    done = show(">/dev/full", *words[3:])
    assert done.returncode == 1
    assert done.stderr.startswith(b"paceline: ")
    assert b"No space left on device" in done.stderr
    assert done.stderr.count(b"\n") == 1


def test_names_that_are_no_text_are_shown_by_numbers(tmp_path: Path) -> None:
    keys = tmp_path / os.fsdecode(b"k\xff")
    done = show("", "keys", "make", keys, PYTHONIOENCODING="utf-8")
    assert done.returncode == 0
    assert b"k\\udcff holds keys until" in done.stdout


def test_a_file_of_commands_is_not_printed_with_other_letters() -> None:
    done = show("", "launch", "--emit", "slurm", "tr\u00e4in.py", PYTHONIOENCODING="ascii", PYTHONUTF8="1")
    assert done.returncode == 2
    assert done.stdout == b""
    assert b"standard output, in ascii, lacks letters of the script or its arguments" in done.stderr


FLOOD = """
import select
os.set_blocking(1, False)
num_written = 0
while select.select([], [1], [], 1.0)[1] or num_written < 1_000_000:  # less is in pipes where a launcher is late
    try:
        num_written += os.write(1, b"x" * 999 + b"\\n")
    except BlockingIOError:
        pass
print("stalled", file=sys.stderr, flush=True)
"""


def test_behind_a_reader_that_stalls_signals_are_answered(tmp_path: Path) -> None:
    words = command(write_script(tmp_path, FLOOD + "signal.pause()"), {"num_workers": 1})
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert b"stalled" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(launching.TIMEOUT_S) == 128 + signal.SIGTERM
        told = process.stderr.read().decode()
        assert "stopped by SIGTERM" in told
        assert "bytes of output were dropped: nothing read them" in told


def test_behind_a_reader_that_stalls_deaths_are_seen(tmp_path: Path) -> None:
    script = FLOOD + "sys.exit(3)"
    words = command(write_script(tmp_path, script), {"num_workers": 1})
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.wait(launching.TIMEOUT_S) == 3
        assert process.stderr is not None
        assert re.search(r"worker 0 \(pid \d+\) ended with exit code 3", process.stderr.read().decode())
