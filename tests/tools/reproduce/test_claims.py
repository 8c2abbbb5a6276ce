from pathlib import Path

import pytest

from paceline.tools.reproduce.catalogue import find_claims
from paceline.tools.reproduce.claim import Claim, ClaimOptions
from paceline.tools.reproduce.programs import ProgramRuns
from paceline.tools.reproduce.swapping import swap

CHEAP = ("2", "6", "7", "9", "13", "23")
# By numbers that no other work on the machine changes; 18 has a part that it does change, and the others run programs.
SEEDED = ("1", "5", "8", "14", "16", "28", "29", "30", "A1")


def finds(claim: Claim, folder: Path) -> list[str]:
    """Run a claim and return the checks that do not hold."""
    assert claim.run is not None
    finding = claim.run(ClaimOptions(True, 0, folder, ProgramRuns()))
    assert 1 <= len(finding.plots) <= 2
    assert finding.note
    return [f"{check.what}: {check.ours}" for check in finding.checks if not check.holds]


@pytest.mark.parametrize("claim", find_claims(CHEAP), ids=lambda claim: claim.name)
def test_what_was_shown_stays_shown(claim: Claim, tmp_path: Path) -> None:
    assert finds(claim, tmp_path) == []


@pytest.mark.campaign
@pytest.mark.parametrize("claim", find_claims(SEEDED), ids=lambda claim: claim.name)
def test_what_takes_longer_stays_shown(claim: Claim, tmp_path: Path) -> None:
    assert finds(claim, tmp_path) == []


@pytest.mark.campaign
def test_a_table_beyond_its_memory_keeps_its_bits_and_is_read_ahead(tmp_path: Path) -> None:
    found = swap(ClaimOptions(True, 0, tmp_path, ProgramRuns()))
    assert found.is_equal
    assert found.ahead == 1
