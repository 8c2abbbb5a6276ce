import os
import resource
import socket
import sys
from contextlib import closing
from pathlib import Path

import pytest

from paceline.observe.resources import ResourceUsage, Usage

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the kernel does not tell")


def used(usage: ResourceUsage | None = None) -> Usage:
    found = (usage or ResourceUsage()).usage()
    assert found is not None
    return found


def test_what_goes_over_a_connection_is_counted_on_both_of_its_ends() -> None:
    with (
        closing(socket.create_server(("127.0.0.1", 0))) as server,
        closing(socket.create_connection(server.getsockname())) as client,
        closing(server.accept()[0]) as other,
    ):
        before = used()
        client.sendall(bytes(5000))
        assert len(other.recv(5000, socket.MSG_WAITALL)) == 5000
        other.sendall(b"got it")  # carries the acknowledgement with it
        assert client.recv(6) == b"got it"
        usage = ResourceUsage()
        after = used(usage)
    assert after.sent_bytes - before.sent_bytes in (5000, 5006)  # the last answer may be unacknowledged yet
    assert after.received_bytes - before.received_bytes == 5006
    assert used(usage).received_bytes >= after.received_bytes  # though the connection is closed


def test_unix_sockets_and_files_count_nothing_and_stay_open() -> None:
    one, other = socket.socketpair()
    with one, other:
        before = used()
        one.sendall(bytes(100))
        assert len(other.recv(100)) == 100
        assert used().sent_bytes == before.sent_bytes


def test_a_process_that_can_open_nothing_more_looks_another_time() -> None:
    usage = ResourceUsage()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    probe = os.dup(0)
    os.close(probe)
    resource.setrlimit(resource.RLIMIT_NOFILE, (probe, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            os.dup(0)
        usage.sample()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert used(usage).peak_bytes > 0


def test_the_peak_of_memory_stays_after_the_memory_is_gone() -> None:
    size_bytes = 64 << 20
    block = bytearray(size_bytes)
    block[::4096] = b"x" * len(block[::4096])
    peak_bytes = used().peak_bytes
    del block
    assert peak_bytes >= size_bytes
    assert used().peak_bytes == pytest.approx(peak_bytes, rel=0.02)  # the kernel counts pages by the batch


def test_a_descriptor_that_is_a_file_by_the_time_it_is_copied_leaves_no_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "file").open("w"):
        monkeypatch.setattr("paceline.observe.resources.os.readlink", lambda _: "socket:[1]")
        before = len(os.listdir("/proc/self/fd"))
        ResourceUsage().sample()
        assert len(os.listdir("/proc/self/fd")) == before
