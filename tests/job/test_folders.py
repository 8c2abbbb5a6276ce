"""Folders that cannot be used are refused with words that name them, their owner and what can be done."""

import errno
import os
import pwd
import re
from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.job.folders import check_private, make_once, make_private

STRANGER = 12345


@pytest.fixture
def owner(monkeypatch: pytest.MonkeyPatch) -> str:
    """Be another user, without a name, from now on; returns what is said of the owner of what was made before."""
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    return f"it belongs to user {pwd.getpwuid(own).pw_name} \\({own}\\), and this process runs as user {STRANGER}; "


def test_a_folder_of_another_user_is_refused_without_advice_that_only_its_owner_could_follow(
    tmp_path: Path, owner: str
) -> None:
    with pytest.raises(UsageError, match=f"^others than you can write in {tmp_path}: {owner}name another folder$"):
        make_private(tmp_path, "name another folder")


def test_keys_of_another_user_are_refused_likewise(tmp_path: Path, owner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.job.folders._SUPERUSER", -1)  # whose keys all may use; the tests may run as that one
    with pytest.raises(UsageError, match=f"clients in, with {tmp_path}: {owner}run it as that user, or name another"):
        check_private(tmp_path, [])


def test_a_folder_of_this_user_that_others_can_write_in_is_refused_with_what_mends_it(tmp_path: Path) -> None:
    tmp_path.chmod(0o770)
    told = f"others than you can write in {tmp_path}: chmod 700 it; or name another folder"
    with pytest.raises(UsageError, match=told):
        make_private(tmp_path, "name another folder")
    with pytest.raises(UsageError, match=r"has mode 0770 .* Make it yours alone with `chmod 700`"):
        check_private(tmp_path, [])


def test_a_file_for_which_there_is_no_room_is_named_and_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=re.escape(f"No space left on device: '{tmp_path / 'view'}'")):
        make_once(tmp_path / "view", b"1")
    assert not any(tmp_path.iterdir())


def fail_to_link(monkeypatch: pytest.MonkeyPatch, problem: int, *, is_done: bool) -> None:
    """Have a link end with an error, be it that it was made."""
    link = os.link

    def fail(unfinished: Path, path: Path) -> None:
        if is_done:
            link(unfinished, path)
        raise OSError(problem, os.strerror(problem))

    monkeypatch.setattr(os, "link", fail)


@pytest.mark.parametrize("problem", [errno.EEXIST, errno.EIO])
def test_a_file_is_made_whose_link_was_made_before_it_failed(
    problem: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_to_link(monkeypatch, problem, is_done=True)
    assert make_once(tmp_path / "view", b"1"), "a client of NFS may repeat what was done"
    assert [path.name for path in tmp_path.iterdir()] == ["view"]


def test_that_a_file_cannot_be_made_does_not_say_that_another_process_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_to_link(monkeypatch, errno.EDQUOT, is_done=False)
    with pytest.raises(OSError, match="quota"):
        make_once(tmp_path / "view", b"1")
    assert not any(tmp_path.iterdir())
