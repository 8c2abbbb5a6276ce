"""`paceline keys`: a folder of keys is made once, handed on without its authority, rotated and revoked."""

from __future__ import annotations

import queue
import stat
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from paceline import cli
from paceline.errors import AuthenticationFailed, PeerError, UsageError
from paceline.job.credentials.certificates import Authority
from paceline.job.credentials.holders import Holder, TokenFiles, tls_settings
from paceline.job.credentials.key_store import (
    certificates,
    expire_previous_token,
    issue_keys,
    make_keys,
    revoke,
    rotate_token,
)
from paceline.job.credentials.revocation import watching_revoked
from paceline.transport import Listener, TcpTransport


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


def carrier(folder: Path, holder: Holder, told: list[str] | None = None) -> TcpTransport:
    notice = None if told is None else told.append
    return TcpTransport(TokenFiles(folder, "job"), tls=tls_settings(folder, holder), notice=notice)


def can_meet(listener: Listener, folder: Path, holder: Holder) -> bool:
    """Whether this holder is let in, with the files that it has now."""
    try:
        client = carrier(folder, holder).connect(listener.address, b"", timeout_s=30)
    except PeerError:
        return False
    with closing(client), closing(listener.accept(timeout_s=30)) as accepted:
        return accepted.peer_identity.holder == str(holder)


def test_a_folder_of_keys_is_for_its_owner_alone(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == [
        "any.key",
        "any.pem",
        "authority.key",
        "authority.pem",
        "token",
    ]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_keys_are_never_overwritten(folder: Path, tmp_path: Path) -> None:
    before = (folder / "authority.key").read_bytes()
    with pytest.raises(UsageError, match="keys are not overwritten"):
        make_keys(folder)
    assert (folder / "authority.key").read_bytes() == before
    issue_keys(folder, Holder("worker", 1), tmp_path / "out")
    with pytest.raises(UsageError, match="has a key for worker-1"):
        issue_keys(folder, Holder("worker", 1), tmp_path / "out")


def test_what_is_carried_away_cannot_sign(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    issue_keys(folder, Holder("worker", 1), out)
    issue_keys(folder, Holder("server", 0), out)
    assert "authority.key" not in {path.name for path in out.iterdir()}
    with pytest.raises(UsageError, match="where `paceline keys make` was run"):
        issue_keys(out, Holder("worker", 2), tmp_path / "more")
    with closing(carrier(folder, Holder("any")).listen("127.0.0.1:0")) as listener:
        assert can_meet(listener, out, Holder("worker", 1))


def test_keys_of_two_folders_do_not_mix(folder: Path, tmp_path: Path) -> None:
    make_keys(tmp_path / "other")
    issue_keys(folder, Holder("worker", 1), tmp_path / "out")
    with pytest.raises(UsageError, match="another token"):
        issue_keys(tmp_path / "other", Holder("worker", 2), tmp_path / "out")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("precious")
    with pytest.raises(UsageError, match="something else than issued keys"):
        issue_keys(folder, Holder("worker", 2), tmp_path / "mine")


def test_both_tokens_hold_until_the_previous_one_is_ended(folder: Path, tmp_path: Path) -> None:
    out, worker = tmp_path / "out", Holder("worker", 1)
    issue_keys(folder, worker, out)
    with closing(carrier(folder, Holder("any")).listen("127.0.0.1:0")) as listener:
        rotate_token(folder)
        assert can_meet(listener, folder, Holder("any")), "with the new one"
        assert can_meet(listener, out, worker), "with the one of before"
        with pytest.raises(UsageError, match="still holds"):
            rotate_token(folder)
        expire_previous_token(folder)
        assert not can_meet(listener, out, worker)
        (out / "token").write_bytes((folder / "token").read_bytes())
        assert can_meet(listener, out, worker)


@pytest.mark.parametrize("by", ["holder", "serial"])
def test_a_revoked_holder_is_turned_away_from_then_on(folder: Path, tmp_path: Path, by: str) -> None:
    out, worker, other = tmp_path / "out", Holder("worker", 1), Holder("worker", 2)
    for holder in (worker, other):
        issue_keys(folder, holder, out)
    serial = next(found.serial for found in certificates(folder) if found.holder == "worker-1")
    with closing(carrier(folder, Holder("any")).listen("127.0.0.1:0")) as listener:
        assert can_meet(listener, out, worker)
        assert revoke(folder, "worker-1" if by == "holder" else serial.lower()) == 1
        assert not can_meet(listener, out, worker)
        assert can_meet(listener, out, other)
    assert [found.holder for found in certificates(folder) if found.revoked] == ["worker-1"]


def test_a_revoked_server_is_not_called(folder: Path, tmp_path: Path) -> None:
    server = Holder("server", 0)
    issue_keys(folder, server, tmp_path / "out")
    revoke(folder, "server-0")
    with (
        closing(carrier(tmp_path / "out", server).listen("127.0.0.1:0")) as listener,
        pytest.raises(AuthenticationFailed, match="was revoked"),
    ):
        carrier(folder, Holder("any")).connect(listener.address, b"", timeout_s=30)


def test_no_certificate_is_made_for_a_revoked_holder(folder: Path, tmp_path: Path) -> None:
    revoke(folder, "worker-1")
    with pytest.raises(UsageError, match="worker-1 is revoked"):
        issue_keys(folder, Holder("worker", 1), tmp_path / "out")


def test_an_authority_is_the_same_when_read(folder: Path) -> None:
    read = Authority.read(folder)
    assert (read.job, read.pem) == ("any", (folder / "authority.pem").read_bytes())


def test_what_ends_soon_is_said(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", days=10)
    found, now = certificates(tmp_path / "keys")[0], datetime.now(UTC)
    assert found.trouble(now) == ""
    assert found.trouble(now + timedelta(days=8)) == "ends in 1 days"
    assert found.trouble(now + timedelta(days=10)) == "expired"


def test_the_command_line_tells_no_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys, out = str(tmp_path / "keys"), str(tmp_path / "out")
    lines = (
        ["make", keys, "--days", "3"],
        ["issue", keys, "worker-3", "--out", out],
        ["rotate", keys],
        ["rotate", keys, "--finish"],
        ["revoke", keys, "worker-3"],
        ["show", keys],
    )
    assert [cli.answer(["keys", *line]) for line in lines] == [0] * len(lines)
    said = capsys.readouterr().out
    assert "worker-3     until" in said
    assert "revoked" in said
    assert "ends in 2 days" in said
    secrets = [path.read_bytes() for folder in (tmp_path / "keys", tmp_path / "out") for path in folder.glob("*.key")]
    assert not any(secret.decode().splitlines()[1] in said for secret in secrets)
    assert (tmp_path / "keys" / "token").read_bytes().hex() not in said


@pytest.mark.parametrize("subject", ["worker", "worker--1", "worker-x", "king-1", "worker-1\nany", "any-1", ""])
def test_only_names_and_serial_numbers_are_revoked(folder: Path, subject: str) -> None:
    with pytest.raises(UsageError, match="not the name of a holder"):
        revoke(folder, subject)
    assert not (folder / "revoked").exists()


def test_keys_that_are_gone_end_no_process(folder: Path, tmp_path: Path) -> None:
    """Neither the one that calls nor the one that listens, which goes on when they are back."""
    told: list[str] = []
    issue_keys(folder, Holder("worker", 1), tmp_path / "out")
    server, client = carrier(folder, Holder("any"), told), carrier(folder, Holder("any"))
    with closing(server.listen("127.0.0.1:0")) as listener:
        token = (folder / "token").read_bytes()
        (folder / "token").unlink()
        with pytest.raises(AuthenticationFailed, match=r"cannot prove to .* who we are: cannot read the job's token"):
            client.connect(listener.address, b"", timeout_s=30)
        assert not can_meet(listener, tmp_path / "out", Holder("worker", 1))
        (folder / "token").write_bytes(token)
        assert can_meet(listener, tmp_path / "out", Holder("worker", 1))
    assert any("was turned away: cannot read the job's token" in line for line in told)


def test_what_no_server_reads_is_neither_revoked_nor_rotated(folder: Path, tmp_path: Path) -> None:
    issue_keys(folder, Holder("worker", 3), tmp_path / "client")
    issue_keys(folder, Holder("server", 0), tmp_path / "server")
    with pytest.raises(UsageError, match=r"was issued for worker-3: no server looks there, so nothing would end"):
        revoke(tmp_path / "client", "worker-3")
    assert not (tmp_path / "client" / "revoked").exists()
    assert revoke(tmp_path / "server", "worker-3") == 0
    before = (tmp_path / "client" / "token").read_bytes()
    for issued in ("client", "server"):
        with pytest.raises(UsageError, match="a token that is made there is known to no server"):
            rotate_token(tmp_path / issued)
    assert (tmp_path / "client" / "token").read_bytes() == before


@pytest.mark.parametrize("line", ["worker_3", "Worker-3", "worker-03", "worker-3 # stolen", "0x1F", "all"])
def test_a_line_that_revokes_nothing_is_told_and_the_others_hold(folder: Path, tmp_path: Path, line: str) -> None:
    path = folder / "revoked"
    path.write_text(f"worker-1\n\n{line}\n")
    with pytest.raises(UsageError, match=rf"line 3 of .*revoked is '{line}', expected a holder such as worker-3"):
        revoke(folder, "worker-2")
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    expelled: queue.SimpleQueue[frozenset[str]] = queue.SimpleQueue()
    server = TcpTransport(TokenFiles(folder, "job"), tls=tls_settings(folder, Holder("any")), notice=told.put)
    with closing(server.listen("127.0.0.1:0")) as listener:
        assert not can_meet(listener, folder, Holder("any"))
        assert "line 3 of" in told.get(timeout=30)
    with watching_revoked(path, expelled.put):
        assert expelled.get(timeout=30) == {"worker-1"}
        path.write_text("worker-1\nworker-3\n")
        assert expelled.get(timeout=30) == {"worker-1", "worker-3"}


def test_a_serial_number_may_be_written_as_other_programs_print_it(folder: Path) -> None:
    serial = certificates(folder)[1].serial
    octets = f"{serial:0>{len(serial) + len(serial) % 2}}"
    (folder / "revoked").write_text(":".join(octets[start : start + 2] for start in range(0, len(octets), 2)).lower())
    assert [found.revoked for found in certificates(folder)] == [False, True]
