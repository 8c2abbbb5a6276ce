"""The number of a server that stands in for others, and the folder of views in which they find it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.serve.daemon import daemon

from paceline.cli import answer
from paceline.errors import UsageError
from paceline.serve.numbers import own_number
from paceline.serve.state import StateFolder


def test_the_number_of_a_server_stays(tmp_path: Path) -> None:
    state = StateFolder(tmp_path / "state")
    number = own_number(state)
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
