import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from paceline.cli import answer
from paceline.errors import PacelineError
from paceline.tools.reproduce import catalogue, command
from paceline.tools.reproduce.catalogue import find_claims
from paceline.tools.reproduce.claim import Check, Claim, ClaimOptions, Curve, Finding, Plot
from paceline.tools.reproduce.results import read_result

PNG = b"\x89PNG"
BARS = Plot(
    "bars", "", "y", (Curve("ours", ("a", "b"), (1.0, 2.0)), Curve("theirs", ("a", "b"), (1.0, 2.0), True)), "bars"
)
LINES = Plot("lines", "x", "y", (Curve("ours", (1.0, 2.0), (0.1, 0.2)),), is_log_x=True, is_log_y=True)


def found(*, holds: bool) -> Finding:
    checks = (Check("what", "at most 1", "0.5", True), Check("a price in $", "a $ too", "3 $", holds))
    return Finding(checks, (BARS, LINES), "A note with a $ in it. " * 20, ("python program.py --json",))


def stand_in(monkeypatch: pytest.MonkeyPatch, claim: Claim) -> None:
    """Let the first claim be another one."""
    claims = (claim, *catalogue.CLAIMS[1:])
    monkeypatch.setattr(catalogue, "CLAIMS", claims)
    monkeypatch.setattr(command, "CLAIMS", claims)


def test_the_list_has_a_line_for_each_claim(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["reproduce"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for claim in catalogue.CLAIMS:
        assert [line for line in lines if claim.title in line and claim.paper in line and claim.time in line]


def test_the_list_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["reproduce", "--json"]) == 0
    claims = json.loads(capsys.readouterr().out)["claims"]
    assert [claim["name"] for claim in claims] == [claim.name for claim in catalogue.CLAIMS]
    assert claims[7]["anchors"] == ["A7"]


def test_an_unknown_claim_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["reproduce", "99", "--out", str(tmp_path / "out")]) == 2
    assert "there is no claim '99'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", [["--seed", "-1"], ["--seed", "1.5"]])
def test_a_wrong_seed_is_a_usage_error(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["reproduce", "2", *options]) == 2
    assert "--seed" in capsys.readouterr().err


def test_an_output_folder_that_cannot_be_made_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert answer(["reproduce", "2", "--out", str(tmp_path / "file" / "out")]) == 2
    assert "name another --out" in capsys.readouterr().err


def test_a_claim_on_virtual_time_is_run_drawn_and_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = answer(["reproduce", "4", "23", "--quick", "--seed", "3", "--out", str(tmp_path), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert code == 0
    assert {name: claim["verdict"] for name, claim in told["claims"].items()} == {"4": "shown", "23": "shown"}
    result = read_result("4", tmp_path)
    assert result is not None
    assert (result.verdict, result.is_quick, result.seed) == ("shown", True, 3)
    assert result.commands == ("paceline reproduce 4 --quick --seed 3",)
    assert (tmp_path / result.picture).read_bytes().startswith(PNG)


def test_one_seed_gives_the_same_numbers(tmp_path: Path) -> None:
    (claim,) = find_claims(["4"])
    assert claim.run is not None
    options = ClaimOptions(True, 1, tmp_path, command.ProgramRuns())
    assert claim.run(options) == claim.run(options)
    assert claim.run(options) != claim.run(replace(options, seed=2))


def test_a_check_that_does_not_hold_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch, replace(catalogue.CLAIMS[0], run=lambda _: found(holds=False)))
    assert answer(["reproduce", "1", "--out", str(tmp_path)]) == 1
    assert "DOES NOT a price in $: 3 $ (anchor: a $ too)" in capsys.readouterr().out
    result = read_result("1", tmp_path)
    assert result is not None
    assert result.verdict == "not shown"
    assert result.commands == ("paceline reproduce 1 --seed 0", "python program.py --json")
    assert (tmp_path / "claim-1.png").read_bytes().startswith(PNG)


def test_a_run_that_fails_is_told_and_does_not_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: ClaimOptions) -> Finding:
        raise PacelineError("no room for it")

    stand_in(monkeypatch, replace(catalogue.CLAIMS[0], run=fail))
    assert answer(["reproduce", "1", "13", "--out", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "no room for it" in shown
    assert "shown       13." in shown
    result = read_result("1", tmp_path)
    assert result is not None
    assert (result.verdict, result.note, result.picture) == ("failed", "no room for it", "")


def test_a_claim_that_cannot_be_shown_gives_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch, replace(catalogue.CLAIMS[0], run=None, reason="It takes a thousand machines."))
    assert answer(["reproduce", "1", "--out", str(tmp_path)]) == 0
    assert "explained    1." in capsys.readouterr().out
    assert answer(["reproduce"]) == 0
    assert "not here" in capsys.readouterr().out
