"""The number of a server that stands in for others, and the folder of views in which they find it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.serve.daemon import daemon

from paceline.cli import answer
from paceline.errors import UsageError
from paceline.serve import replicas
from paceline.serve.numbers import keep_number, own_number, require_same_views
from paceline.serve.state import StateFolder


def test_the_number_of_a_server_stays(tmp_path: Path) -> None:
    state = StateFolder(tmp_path / "state")
    number = own_number(state)
    keep_number(state, number)
    assert own_number(state) == number
    (state.path / "server").write_text("two")
    with pytest.raises(UsageError, match="says 'two', expected the number of this server"):
        own_number(state)
    state.close()


@pytest.mark.parametrize("options", [[], ["--alone"], ["--take-over"]], ids=" ".join)
@pytest.mark.parametrize("views", [None, "not-mounted"])
def test_a_server_that_stands_in_for_others_does_not_serve_without_their_views(
    views: str | None, options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = tmp_path / "state"
    with daemon(state, views=tmp_path / "views"):
        pass
    given = [] if views is None else ["--views", str(tmp_path / views)]
    assert answer(["serve", "--state", str(state), *given, *options]) == 2
    said = capsys.readouterr().err
    assert f"the server of {state} stands in for others" in said
    assert f"remove {state / 'server'}" in said
    assert not (tmp_path / "not-mounted").exists()


def test_a_server_that_the_others_cannot_find_yet_has_no_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    state, views = tmp_path / "state", tmp_path / "views"
    with monkeypatch.context() as patch:
        patch.setattr(replicas, "write_durably", fail)
        with pytest.raises(OSError, match="No space left on device"), daemon(state, views=views):
            pass
    require_same_views(state, None)
    with daemon(state, views=views):
        require_same_views(state, views)
