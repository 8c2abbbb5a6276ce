"""A session that cannot be left, or never begins, leaves nothing behind all the same."""

from __future__ import annotations

import pytest
from tests.leaks import nothing_left_behind

import paceline
from paceline.errors import UsageError
from paceline.worker.node import WorkerNode


class Unreachable(Exception):
    """What stands for an error on the way out."""


@pytest.mark.parametrize("step", ["_settle_parameters", "exchange", "node"])
def test_an_error_while_it_is_left_frees_all(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise Unreachable

    with nothing_left_behind():
        session = paceline.connect()
        target, name = {
            "_settle_parameters": (type(session), "_settle_parameters"),
            "exchange": (type(session.exchange), "close"),
            "node": (type(session.node), "leave"),
        }[step]
        monkeypatch.setattr(target, name, fail)
        with pytest.raises(Unreachable):
            session.close()
        assert session.closed
        monkeypatch.undo()
        del session


def test_a_script_that_is_not_admitted_keeps_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise Unreachable

    monkeypatch.setattr(WorkerNode, "join", fail)
    with nothing_left_behind(), pytest.raises(Unreachable):
        paceline.connect()


def test_a_script_speaks_to_no_session_that_is_over_and_tells_none_where_its_servers_are() -> None:
    with paceline.connect() as session, pytest.raises(UsageError, match="as worker 0, and it has its server: leave"):
        paceline.init(session, servers="first:1")
    with pytest.raises(UsageError, match="as worker 0, and it is closed: connect again"):
        paceline.init(session)
