"""What became of each claim, as JSON in the output folder: one file a claim, so that runs add up."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Literal

import msgspec
from msgspec.structs import asdict

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.tools.reproduce.claim import Check, Claim, Finding

Verdict = Literal["shown", "not shown", "explained", "failed"]


class ClaimResult(msgspec.Struct, frozen=True):
    """The verdict on one claim.

    Args:
        claim: its name.
        verdict: "explained" for a claim that cannot be shown here, "failed" for a run that did not end well.
        commands: what draws the picture anew, and what it ran.
        is_quick: whether the run was a quick one.
        seed: of the run.
        seconds: that it took.
        note: what the numbers rest on, or the reason of a verdict without numbers.
        checks: the numbers beside their anchors.
        picture: its file name; "" without one.
    """

    claim: str
    verdict: Verdict
    commands: tuple[str, ...]
    is_quick: bool
    seed: int
    seconds: float
    note: str
    checks: tuple[dict[str, str | bool], ...] = ()
    picture: str = ""


def judge(finding: Finding) -> Verdict:
    """Return the verdict: shown if every check holds."""
    return "shown" if finding.holds else "not shown"


def plain_checks(checks: tuple[Check, ...]) -> tuple[dict[str, str | bool], ...]:
    """Return checks as JSON has them."""
    return tuple(asdict(check) for check in checks)


def write_result(result: ClaimResult, claim: Claim, folder: Path) -> Path:
    """Write one result, with what the claim says, as `claim-NAME.json`; return its path."""
    path = folder / f"claim-{result.claim}.json"
    said = {
        "title": claim.title,
        "paper": claim.paper,
        "number": claim.number,
        "anchors": claim.anchors,
        "time": claim.time,
    }
    path.write_text(
        json.dumps(said | msgspec.to_builtins(result), indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    return path


def read_result(name: str, folder: Path) -> ClaimResult | None:
    """Return the result of a claim that a folder has, or None."""
    path = folder / f"claim-{name}.json"
    if not path.is_file():
        return None
    return msgspec.json.decode(path.read_bytes(), type=ClaimResult)
