"""What users are told of a carrier."""

from types import SimpleNamespace

import pytest

from paceline.job.carriers import tell_user


def test_a_line_for_users_is_one_write_so_that_no_other_process_writes_in_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writes: list[str] = []
    monkeypatch.setattr("sys.stderr", SimpleNamespace(write=writes.append, flush=lambda: None))

    tell_user("it is slower than it could be")

    assert writes == ["paceline: it is slower than it could be\n"]
