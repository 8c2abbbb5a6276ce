"""`paceline reproduce`: list the claims of the field, run some or all of them, draw and judge."""

from __future__ import annotations

import json as json_format
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from cyclopts import Parameter

from paceline.errors import PacelineError, UsageError
from paceline.tools.reproduce.catalogue import CLAIMS, find_claims
from paceline.tools.reproduce.claim import Claim, ClaimOptions
from paceline.tools.reproduce.gallery import write_gallery
from paceline.tools.reproduce.picture import draw_claim
from paceline.tools.reproduce.programs import ProgramRuns
from paceline.tools.reproduce.results import ClaimResult, judge, plain_checks, write_result

if TYPE_CHECKING:
    from rich.table import Table

_LISTED_COLUMNS: Final = 160  # of a list that goes to a file or another program: a claim a line


def reproduce(
    *claims: str,
    quick: Annotated[bool, Parameter(negative="")] = False,
    seed: int = 0,
    out: Path = Path("reproduced"),
    gallery: Path | None = None,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Show what papers on parameter servers and distributed training claim: a picture and a verdict for each.

    Without names it lists all claims. A claim that does not hold here is reported, and the exit code is 1.

    Parameters
    ----------
    claims
        Numbers of claims, anchors (A1 to A12), or all; without any, the claims are listed.
    quick
        Fewer seeds and shorter runs: all claims in less than ten minutes on two cores.
    seed
        Seed of all random numbers.
    out
        Folder for claim-NAME.png and claim-NAME.json; results of earlier runs stay.
    gallery
        Also write a page of all results in the folder, in Markdown, to this file.
    json
        Print one JSON object instead of lines.
    """
    if seed < 0:
        raise UsageError(f"--seed is {seed}, expected 0 or more")
    chosen = find_claims(claims)
    if not claims and gallery is None:
        _list(as_json=json)
        return 0
    if chosen and find_spec("matplotlib") is None:
        raise UsageError("paceline reproduce draws with matplotlib, not installed here: pip install 'paceline[plots]'.")
    _make_folder(out)
    results = _run_all(chosen, quick=quick, seed=seed, out=out)
    if gallery is not None:
        write_gallery(gallery, out)
    _report(results, out, as_json=json)
    return int(any(result.verdict in ("not shown", "failed") for result in results))


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write to {out}: {error.strerror}; name another --out") from error


def _run_all(chosen: tuple[Claim, ...], *, quick: bool, seed: int, out: Path) -> list[ClaimResult]:
    results, options = list[ClaimResult](), ClaimOptions(quick, seed, out, ProgramRuns())
    for place, claim in enumerate(chosen, start=1):
        print(f"[{place}/{len(chosen)}] {claim.name}. {claim.title}", file=sys.stderr, flush=True)
        result = run_claim(claim, options)
        write_result(result, claim, out)
        print(f"    {result.verdict}, {result.seconds:.0f} s", file=sys.stderr, flush=True)
        results.append(result)
    return results


def run_claim(claim: Claim, options: ClaimOptions) -> ClaimResult:
    """Run one claim and draw its picture; a run that fails is a result, too."""
    began_s = time.monotonic()
    commands = (command_of(claim, options),)
    if claim.run is None:
        return ClaimResult(claim.name, "explained", commands, options.is_quick, options.seed, 0.0, claim.reason)
    try:
        finding = claim.run(options)
    except PacelineError as error:
        took_s = time.monotonic() - began_s
        return ClaimResult(claim.name, "failed", commands, options.is_quick, options.seed, took_s, str(error))
    commands += finding.commands
    picture = f"claim-{claim.name}.png"
    draw_claim(claim, finding, commands, options.folder / picture)
    return ClaimResult(
        claim.name,
        judge(finding),
        commands,
        options.is_quick,
        options.seed,
        time.monotonic() - began_s,
        finding.note,
        plain_checks(finding.checks),
        picture,
    )


def command_of(claim: Claim, options: ClaimOptions) -> str:
    """Return the command that runs a claim as it was run."""
    return f"paceline reproduce {claim.name}{' --quick' if options.is_quick else ''} --seed {options.seed}"


def _list(*, as_json: bool) -> None:
    if as_json:
        print(json_format.dumps({"claims": [_said(claim) for claim in CLAIMS]}))
        return
    from rich.console import Console

    console = Console() if sys.stdout.isatty() else Console(width=_LISTED_COLUMNS)
    console.print(_table())
    print(
        "\n`paceline reproduce 8` runs claim 8; several numbers, anchors such as A7, and `all` work too.\n"
        "--quick shortens the runs. Each ends with a verdict and a picture.\n"
        "Time is real where processes of this machine run, virtual where the protocol runs on simulated time, and\n"
        "counted where only bytes matter."
    )


def _said(claim: Claim) -> dict[str, object]:
    return {
        "name": claim.name,
        "title": claim.title,
        "paper": claim.paper,
        "number": claim.number,
        "anchors": claim.anchors,
        "time": claim.time,
        "minutes_quick": claim.minutes[0],
        "minutes": claim.minutes[1],
        "runs": claim.run is not None,
        "reason": claim.reason,
    }


def _table() -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("", justify="right")
    for heading in ("claim", "paper", "anchors"):
        table.add_column(heading)
    table.add_column("time", no_wrap=True)
    table.add_column("minutes (quick)", justify="right")
    for claim in CLAIMS:
        quick, full = claim.minutes
        minutes = f"{full:g} ({quick:g})" if claim.run else "not here"
        table.add_row(claim.name, claim.title, claim.paper, " ".join(claim.anchors), claim.time, minutes)
    return table


def _report(results: list[ClaimResult], out: Path, *, as_json: bool) -> None:
    if as_json:
        told = {
            result.claim: {"verdict": result.verdict, "seconds": result.seconds, "checks": result.checks}
            for result in results
        }
        print(json_format.dumps({"folder": str(out), "claims": told}))
        return
    titles = {claim.name: claim.title for claim in CLAIMS}
    for result in results:
        print(f"{result.verdict:10} {result.claim:>3}. {titles[result.claim]}")
        for check in result.checks:
            sign = "holds   " if check["holds"] else "DOES NOT"
            print(f"           {sign} {check['what']}: {check['ours']} (anchor: {check['expected']})")
        if not result.checks:
            print(f"           {result.note}")
    if results:
        print(f"{sum(result.seconds for result in results):.0f} s in all; pictures and numbers in {out}")
