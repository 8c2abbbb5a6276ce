import pytest

from paceline.errors import UsageError
from paceline.tools.reproduce.catalogue import CLAIMS, find_claims


def test_all_claims_and_anchors_are_in_the_list() -> None:
    assert [claim.name for claim in CLAIMS] == [*map(str, range(1, 32)), "A1", "A2"]
    assert {anchor for claim in CLAIMS for anchor in claim.anchors} == {f"A{number}" for number in range(1, 13)}


def test_a_claim_runs_or_says_why_not() -> None:
    assert [claim.name for claim in CLAIMS if (claim.run is None) == (not claim.reason)] == []


def test_quick_runs_of_all_claims_take_twenty_minutes_at_most() -> None:
    """Claims that share the run of a program say its minutes once each, so this is an upper bound."""
    assert sum(claim.minutes[0] for claim in CLAIMS if claim.run) <= 20


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["8"], ["8"]),
        (["14", "A7", "8"], ["8", "14"]),
        (["a1"], ["A1"]),
        (["A3"], ["4", "5"]),
        ([], []),
    ],
)
def test_claims_are_found_by_number_and_by_anchor(names: list[str], found: list[str]) -> None:
    assert [claim.name for claim in find_claims(names)] == found


def test_all_finds_all() -> None:
    assert find_claims(["all"]) == CLAIMS


@pytest.mark.parametrize("name", ["32", "A13", "", "ssp", "0"])
def test_an_unknown_claim_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"there is no claim '{name}'.*from 1 to 31.*lists them"):
        find_claims(["8", name])
