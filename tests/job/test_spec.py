"""The file that the processes of a job agree on."""

import os
import stat
from pathlib import Path

import pytest
from msgspec.structs import replace

from paceline.errors import DeadlineExceeded, UsageError
from paceline.job.addresses import AddressBook, data_addresses
from paceline.job.spec import ClusterSpec, read_token, wait_spec, write_token

SPEC = ClusterSpec(job="3f", num_workers=4, num_servers=2, transport="tcp", run_dir="/run", addresses=("a", "b"))


def test_round_trip_in_a_private_file(tmp_path: Path) -> None:
    path = tmp_path / "spec.json"

    replace(SPEC, consistency="ssp:3", scale="mean").write(path)

    assert ClusterSpec.read(path) == replace(SPEC, consistency="ssp:3", scale="mean")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not a cluster spec"),
        ("{}", "missing required field `job`"),
        (
            '{"job": "1", "num_workers": 1, "num_servers": 1, "run_dir": "/", "transport": "pigeon"}',
            r"Invalid enum value 'pigeon' - at `\$.transport`",
        ),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "spec.json"
    path.write_text(content)

    with pytest.raises(UsageError, match=message):
        ClusterSpec.read(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read the cluster spec .*none\.json: No such file"):
        ClusterSpec.read(tmp_path / "none.json")


def test_a_pipe_or_a_device_is_no_spec(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(UsageError, match=r"cannot read the cluster spec .*: it is not a file"):
            ClusterSpec.read(path)


def test_waiting_for_a_spec_has_a_deadline(tmp_path: Path) -> None:
    with pytest.raises(DeadlineExceeded, match=r"no cluster spec at .* after 0\.02 s"):
        wait_spec(tmp_path / "cluster.json", timeout_s=0.02)

    SPEC.write(tmp_path / "cluster.json")
    assert wait_spec(tmp_path / "cluster.json", timeout_s=0.0) == SPEC


def test_the_token_is_long_private_and_never_the_same(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    write_token(tmp_path)
    write_token(tmp_path / "other")

    assert len(read_token(tmp_path)) == 32
    assert read_token(tmp_path) != read_token(tmp_path / "other")
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600


def test_a_token_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the job's token"):
        read_token(tmp_path)

    (tmp_path / "token").write_bytes(b"short")
    with pytest.raises(UsageError, match="has 5 bytes, expected 32"):
        read_token(tmp_path)


def test_addresses_are_published_once_all_are_known(tmp_path: Path) -> None:
    book = AddressBook(replace(SPEC, run_dir=str(tmp_path), addresses=()))
    (tmp_path / "server-1.address").write_text("tcp://b\n")

    assert (book.poll(), book.missing()) == (False, ["server 0"])
    assert not (tmp_path / "cluster.json").exists()

    (tmp_path / "server-0.address").write_text("tcp://a\n")
    assert book.poll()
    assert ClusterSpec.read(tmp_path / "cluster.json").addresses == ("tcp://a", "tcp://b")


def test_data_servers_are_awaited_too_and_may_listen_elsewhere_later(tmp_path: Path) -> None:
    book = AddressBook(replace(SPEC, run_dir=str(tmp_path), num_servers=1, num_data_servers=2, addresses=()))
    (tmp_path / "server-0.address").write_text("tcp://a\n")
    (tmp_path / "data-1.address").write_text("tcp://d1\n")

    assert (book.poll(), book.missing()) == (False, ["data server 0"])

    (tmp_path / "data-0.address").write_text("tcp://d0\n")
    assert book.poll()
    spec = ClusterSpec.read(tmp_path / "cluster.json")
    assert (spec.addresses, spec.data_addresses) == (("tcp://a",), ("tcp://d0", "tcp://d1"))

    (tmp_path / "data-1.address").write_text("tcp://d2\n")
    (tmp_path / "data-0.address").unlink()
    assert data_addresses(spec) == ["tcp://d0", "tcp://d2"]
