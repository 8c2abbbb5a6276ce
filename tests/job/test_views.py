"""Views of a server: of processes that decide at once, one has decided; and when a server has ended."""

import threading
from pathlib import Path
from typing import NoReturn

import pytest

from paceline.job import views as views_module
from paceline.job.addresses import record_server_ended
from paceline.job.spec import write_private
from paceline.job.views import FIRST, View, Views

NUM_PROCESSES = 8


def begun(folder: Path) -> Views:
    views = Views(folder, 3)
    assert views.newest() is None
    assert views.change(FIRST)
    return views


def test_of_processes_that_decide_at_once_one_has_decided(tmp_path: Path) -> None:
    views, won, meet = begun(tmp_path), list[str](), threading.Barrier(NUM_PROCESSES)

    def decide(number: int) -> None:
        own, promotes = Views(tmp_path, 3), number % 2 == 0
        meet.wait(60.0)
        if (own.promote if promotes else own.dismiss)(FIRST.number):
            won.append("promoted" if promotes else "dismissed")

    threads = [threading.Thread(target=decide, args=(number,)) for number in range(NUM_PROCESSES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    [outcome] = won
    assert views.newest() == View(2, head=1 if outcome == "promoted" else 0)
    assert not any(path.name.startswith(".") for path in tmp_path.iterdir()), "something unfinished is left"


def test_a_view_that_has_ended_is_not_followed_by_another(tmp_path: Path) -> None:
    views = begun(tmp_path)
    assert views.promote(FIRST.number)
    assert not views.dismiss(FIRST.number)
    assert not views.promote(FIRST.number)
    assert not views.change(View(2, head=0))
    assert views.newest() == View(2, head=1)


def test_files_of_others_are_no_views(tmp_path: Path) -> None:
    views = begun(tmp_path)
    for name in ("server-3.view-1~", "server-3.view-2.bak", "server-3.view-", "server-3.asked-2.orig"):
        (tmp_path / name).write_text("of another program")
    assert views.newest() == FIRST
    assert views.asked(set()) == []
    views.forget(FIRST.number)
    assert views.newest() is None
    assert len(list(tmp_path.iterdir())) == 4


def test_a_process_that_has_come_is_the_replica_in_one_view(tmp_path: Path) -> None:
    views = begun(tmp_path)
    for process in range(4):
        views.published(process).write_text("")
    assert views.candidates() == [3], "in the place of the replica that there is"
    assert views.promote(FIRST.number)
    assert views.enlist(2, 3)
    assert not views.enlist(2, 2), "another is the replica"
    assert views.newest() == View(3, head=1, replica=3)
    assert views.candidates() == [], "2 is in the other place"
    assert views.dismiss(3)
    assert views.candidates() == [2], "what was lost is not taken again"
    assert Views(tmp_path, 30).candidates() == []


def test_a_process_that_was_started_again_in_the_place_of_the_head_is_no_replica(tmp_path: Path) -> None:
    """Two of them came in the place that a process had which has handed over: the later one serves by now."""
    views = begun(tmp_path)
    assert views.promote(FIRST.number)
    assert views.enlist(2, 4)
    assert views.promote(3)
    for process in (2, 3):
        views.published(process).write_text("")
    assert views.newest() == View(4, head=4)
    assert views.candidates() == [3]


def test_where_the_launcher_decides_the_first_that_asks_has_decided(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("launcher", "head", "replica")]
    for folder in folders:
        folder.mkdir()
    decided, *own = (Views(folder, 3, launcher_decides=folder is not folders[0]) for folder in folders)
    assert decided.change(FIRST)
    give(folders)
    results = dict[int, bool]()
    threads = [
        threading.Thread(target=lambda: results.update({1: own[0].dismiss(FIRST.number)})),
        threading.Thread(target=lambda: results.update({2: own[1].promote(FIRST.number)})),
    ]
    for thread in threads:
        thread.start()
    known: list[set[View]] = [set(), set()]
    while any(thread.is_alive() for thread in threads):
        for views, seen in zip(own, known, strict=True):
            for view in views.asked(seen):
                seen.add(view)
                decided.decide(view)
        give(folders)
    for thread in threads:
        thread.join(60.0)

    assert sorted(results.values()) == [False, True]
    assert decided.newest() == own[0].newest() == own[1].newest() == View(2, head=1 if results[2] else 0)
    assert not decided.decide(View(2, head=0)), "it is over"
    assert not decided.decide(View(4, head=0)), "no process has seen the view before it"


def give(folders: list[Path]) -> None:
    """Give the processes the views of the launcher, as it does."""
    for path in folders[0].glob("server-3.view-*"):
        for folder in folders[1:]:
            write_private(folder / path.name, path.read_bytes())


def test_a_process_that_the_launcher_does_not_answer_does_not_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.job.views.DECISION_TIMEOUT_S", 0.05)
    begun(tmp_path)
    with pytest.raises(TimeoutError, match=r"the launcher did not say which process serves within 0\.05 s"):
        Views(tmp_path, 3, launcher_decides=True).promote(FIRST.number)


def test_without_views_no_process_is_promoted(tmp_path: Path) -> None:
    views = Views(tmp_path / "cleared", 0)
    assert not views.promote(FIRST.number)
    assert views.address() == ""


def test_a_server_listens_where_the_process_that_serves_does(tmp_path: Path) -> None:
    views = begun(tmp_path)
    assert views.address() == ""
    for process in range(2):
        views.published(process).write_text(f"address {process}")
    assert views.address() == "address 0"
    assert views.promote(FIRST.number)
    assert views.address() == "address 1"


def test_a_server_has_ended_when_no_process_of_it_is_left_to_serve(tmp_path: Path) -> None:
    views = begun(tmp_path)
    record_server_ended(tmp_path, 3, "was killed", process=0)
    assert views.how_ended() == ""
    assert views.promote(FIRST.number)
    assert views.how_ended() == ""
    record_server_ended(tmp_path, 3, "ran out of memory", process=1)
    assert views.how_ended() == "ran out of memory"


def test_a_server_whose_two_processes_end_at_once_has_ended(tmp_path: Path) -> None:
    views = begun(tmp_path)
    record_server_ended(tmp_path, 3, "was killed", process=1)
    assert views.how_ended() == ""
    record_server_ended(tmp_path, 3, "was killed, too", process=0)
    assert views.how_ended() == "was killed, too"


def test_a_server_without_a_replica_has_ended_with_its_process(tmp_path: Path) -> None:
    record_server_ended(tmp_path, 0, "was killed")
    assert Views(tmp_path, 0).how_ended() == "was killed"


def test_nothing_is_known_while_the_folder_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_folder: Path) -> NoReturn:
        raise OSError(24, "Too many open files")

    views = begun(tmp_path)
    monkeypatch.setattr(views_module, "names_in", fail)
    assert (views.address(), views.how_ended()) == ("", "")
