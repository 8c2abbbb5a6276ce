import pytest

from paceline.errors import UsageError
from paceline.tools.compare.runs import ComparedEntry, parse_entries


def test_a_strategy_may_have_workers_of_its_own() -> None:
    entries = parse_entries("single, all-reduce,ssp:3+pipeline:2@4", 2)
    assert [entry.num_workers for entry in entries] == [1, 2, 4]
    assert [entry.ranks_per_replica for entry in entries] == [1, 1, 2]
    assert [str(entry) for entry in entries] == ["single", "all-reduce@2", "ssp:3+pipeline:2@4"]


def test_every_run_has_a_folder_of_its_own() -> None:
    entries = parse_entries("bsp,bsp@3,ssp:3,ssp:2,pipeline:2,ssp:3+pipeline:2", 2)
    assert len({entry.file_name for entry in entries}) == len(entries)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "got none"),
        ("bsp,all-reduce,bsp@2", "got bsp@2 twice"),
        ("bsp,sometimes", "'sometimes' is not known"),
        ("pipeline:2@3", "3 workers do not divide"),
        ("bsp@many", "a number of workers"),
        ("bsp@0", "a number of workers"),
        ("single@2", "single is one worker"),
    ],
)
def test_what_cannot_be_compared_is_refused(text: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        parse_entries(text, 2)


def test_one_worker_alone_has_no_strategy() -> None:
    assert ComparedEntry.parse("single", 4) == ComparedEntry(None, 1)
