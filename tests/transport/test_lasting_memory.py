"""Memory that outlives its process: what a killed process leaves is found again, by name."""

from __future__ import annotations

import fcntl
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from paceline.transport.lasting_memory import LastingMemory, MemoryHolder, _Requests
from paceline.transport.segments import Segments, create_memory, map_segment

TIMEOUT_S = 60.0

WRITER = """
import os, signal, socket, sys
from paceline.transport.lasting_memory import LastingMemory
memory = LastingMemory.connect(socket.socket(fileno=int(sys.argv[1])))
memory.region("values", 8)[:] = b"12345678"
memory.region("gone", 8)
memory.drop("gone")
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def holder() -> Iterator[MemoryHolder]:
    with MemoryHolder() as made:
        made.start()
        yield made


def test_a_killed_process_leaves_its_memory_to_its_successor(holder: MemoryHolder) -> None:
    number = holder.theirs.fileno()
    ended = subprocess.run(
        [sys.executable, "-c", WRITER, str(number)], pass_fds=[number], timeout=TIMEOUT_S, check=False
    )
    assert ended.returncode == -9
    successor = LastingMemory.connect(holder.theirs)
    assert (successor.is_successor, successor.has("values"), successor.has("gone")) == (True, True, False)
    assert bytes(successor.region("values", 0)) == b"12345678"
    assert (holder.read("values", 4), holder.read("gone", 4)) == (b"1234", b"")


def test_what_is_no_memory_is_kept_like_it(holder: MemoryHolder) -> None:
    reader, writer = os.pipe()
    LastingMemory.connect(holder.theirs).keep("pipe", reader)
    os.close(reader)
    os.write(writer, b"for the successor")
    os.close(writer)
    successor = LastingMemory.connect(holder.theirs)
    with open(successor.descriptor("pipe"), "rb") as pipe:
        successor.drop("pipe")
        assert (pipe.read(), successor.has("pipe")) == (b"for the successor", False)


def test_a_region_is_zero_at_first_and_the_same_when_asked_for_again(holder: MemoryHolder) -> None:
    memory = LastingMemory.connect(holder.theirs)
    region = memory.region("a", 16)
    assert (memory.is_successor, bytes(region)) == (False, bytes(16))
    region[3] = 7
    assert memory.region("a", 16)[3] == 7
    memory.drop("a")
    memory.drop("a")  # it is not there any more
    assert (memory.region("a", 4).nbytes, memory.region("a", 4)[3]) == (4, 0)


def test_answers_that_a_killed_process_has_not_read_do_not_confuse_its_successor(holder: MemoryHolder) -> None:
    LastingMemory.connect(holder.theirs).region("values", 4)[:] = b"abcd"
    # The process is killed after these requests, and reads nothing of what comes back.
    socket.send_fds(holder.theirs, [b"+late"], [descriptor := create_memory(4)])
    os.close(descriptor)
    holder.theirs.send(b"?12345678")
    memory = LastingMemory.connect(holder.theirs)
    assert bytes(memory.region("values", 4)) == b"abcd"
    assert memory.has("late")
    assert memory.region("more", 4).nbytes == 4


def test_without_a_holder_there_is_an_error_and_no_wait() -> None:
    holder = MemoryHolder()
    ours = holder.theirs.dup()
    holder.close()
    with ours, pytest.raises(OSError, match=r"."):
        LastingMemory.connect(ours)


def test_a_late_answer_is_not_taken_for_that_of_another_request() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        memory = LastingMemory(_Requests(ours), {})
        ours.settimeout(0.001)
        with pytest.raises(OSError, match="has not answered"):
            memory.region("first", 4)
        theirs.send(b"y")
        with pytest.raises(OSError, match="has not answered"):
            memory.region("second", 4)
        assert not memory.has("second")


def test_a_holder_that_can_take_no_more_says_so(holder: MemoryHolder, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = LastingMemory.connect(holder.theirs)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    mine = create_memory(4)
    in_use = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (in_use + 1, hard))
    extra: list[int] = []
    try:
        while True:  # so that the holder, in this process, gets no descriptor
            try:
                extra.append(os.dup(mine))
            except OSError:
                break
        with pytest.raises(OSError, match="cannot take more"):
            memory._requests.ask(b"+values", mine)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in (*extra, mine):
            os.close(descriptor)
    assert holder.read("values", 4) == b""
    assert memory.region("values", 4).nbytes == 4


def test_memory_that_is_shared_cannot_be_written_through_what_peers_get(holder: MemoryHolder) -> None:
    memory, segments = LastingMemory.connect(holder.theirs), Segments(create_memory, str)
    region = memory.region("values", 8)
    segments.share(region, memory.file("values", 8))
    found = segments.find(region[4:])
    assert found is not None
    shared, offset = found
    assert (offset, shared.size_bytes) == (4, 8)
    assert shared.descriptor is not None
    assert fcntl.fcntl(shared.descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(shared.descriptor, b"x")
    shown = map_segment(shared.descriptor, 8, "a peer")
    region[:] = b"abcdefgh"
    assert bytes(shown) == b"abcdefgh"
    shown[0:1] = b"X"  # a page of the peer's own
    assert bytes(region) == b"abcdefgh"


def test_what_is_dropped_while_a_successor_takes_over_does_not_end_the_holder(holder: MemoryHolder) -> None:
    first = LastingMemory.connect(holder.theirs)
    for number in range(100):  # more than the socket takes at once, with names of this length
        first.region(f"{number:08000}", 1)
    holder.theirs.send(b"?12345678")
    # The holder passes them on to a process that is killed meanwhile.
    _, (taken,), _, _ = socket.recv_fds(holder.theirs, 1 << 14, 1)
    os.close(taken)
    for name in holder.names():
        holder.drop(name)
    last = LastingMemory.connect(holder.theirs)
    assert last.names == []
    last.region("new", 1)
    assert holder.names() == ["new"]
