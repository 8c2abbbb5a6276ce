from pathlib import Path

import pytest

from paceline.cli import answer
from paceline.tools.reproduce.catalogue import CLAIMS


def test_the_page_has_all_claims_and_the_results_there_are(tmp_path: Path) -> None:
    page = tmp_path / "docs" / "page.md"
    assert answer(["reproduce", "13", "--quick", "--out", str(tmp_path / "out"), "--gallery", str(page)]) == 0
    text = page.read_text()
    assert all(f"## Claim {claim.name}\n\n{claim.title}." in text for claim in CLAIMS)
    assert "](../out/claim-13.png)" in text
    assert "    paceline reproduce 13 --quick --seed 0" in text
    assert text.count("Not run for this page.") == len(CLAIMS) - 1


def test_results_of_earlier_runs_stay(tmp_path: Path) -> None:
    page, out = tmp_path / "page.md", str(tmp_path / "out")
    assert answer(["reproduce", "13", "--quick", "--out", out]) == 0
    assert answer(["reproduce", "23", "--quick", "--out", out]) == 0
    assert answer(["reproduce", "--gallery", str(page), "--out", out]) == 0
    assert page.read_text().count("Verdict: **shown**") == 2


def test_a_folder_without_results_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["reproduce", "--gallery", str(tmp_path / "page.md"), "--out", str(tmp_path / "out")]) == 2
    assert "has no results of claims; run `paceline reproduce all" in capsys.readouterr().err
