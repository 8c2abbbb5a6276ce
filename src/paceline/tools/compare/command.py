"""`paceline compare`: run a script under several strategies and show them side by side."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from cyclopts import Parameter
from msgspec import json as as_json  # which has null for what is not finite

from paceline.errors import UsageError
from paceline.job.choices import ProcessTransport
from paceline.launch.local import prepare_run_dir
from paceline.launch.script import OPTION, check_script
from paceline.observe.runs import read_run
from paceline.observe.text_tables import print_tables
from paceline.tools.compare.lacking import check_imports, notes_on
from paceline.tools.compare.results import Result, comparison_json, comparison_table, draw_comparison, read_result
from paceline.tools.compare.runs import RunEnded, RunPlan, parse_entries, run_entry
from paceline.tools.run import read_program

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.tools.compare.runs import ComparedEntry

_MEASURED: Final = (
    "Bytes: counted by the kernel on the TCP connections of a worker, from its start to its end; the mean over workers "
    "and steps.\nMemory: the high-water mark of a worker's process, with Python and torch."
)
_SHARED: Final = (
    "Bytes that went through shared memory are not counted, to and from servers or between workers; --transport tcp "
    "counts them."
)


def compare(
    script: Path | None = None,
    /,
    *args: str,
    strategies: str,
    module: str | None = None,
    workers: Annotated[int, Parameter(alias="-n")] = 2,
    servers: Annotated[int, Parameter(alias="-m")] = 1,
    out: Path = Path("comparison"),
    transport: ProcessTransport = "tcp",
    divide_lr: Annotated[bool, Parameter(negative="")] = False,
    title: str = "",
) -> int:
    """Run a script under several strategies, one after another, and compare loss, time, bytes and memory.

    Arguments after -- go to the script. A strategy that fails does not end the others. `-m NAME` in place of the script
    runs a module by its name, as python does; `-m 2` says how many servers there are.

    Parameters
    ----------
    script
        The Python script that every worker runs.
    args
        Its arguments, after --.
    strategies
        Separated by commas: each as `paceline run --strategy` takes it, or `single` for one worker alone; @ and a
        number of workers may follow. Example: single,all-reduce,ssp:3,pipeline:2,all-reduce+pipeline:2@4.
    module
        Name of a module to run in place of a script; also -m.
    workers
        Number of worker processes of strategies without @.
    servers
        Number of server processes.
    out
        New or empty folder for the picture (comparison.png), the numbers (comparison.json), and the traces and output
        of every run.
    transport
        Transport between workers and servers. Bytes are counted over tcp only, which also takes Gloo between workers.
    divide_lr
        As for `paceline run`: divide learning rates by the number of workers where each push is an update of its own.
    title
        Title of the picture.
    """
    entries = parse_entries(strategies, workers)
    for option, number in (("--workers", workers), ("--servers", servers)):
        if number < 1:
            raise UsageError(f"{option} must be at least 1, got {number}")
    if module is not None:  # then what follows -- is all for the module
        script, args = Path(OPTION), (module, *([] if script is None else [str(script)]), *args)
    if script is None:
        raise UsageError("compare needs a script, or -m and the name of a module")
    path, module, args = read_program(script, args)
    check_script(path)
    if module is None:
        check_imports(path)
        for note in notes_on(path, entries):
            print(f"paceline: {note}", file=sys.stderr, flush=True)
    if find_spec("matplotlib") is None:
        raise UsageError("paceline compare draws with matplotlib, not installed here: pip install 'paceline[plots]'.")
    plan = RunPlan(path, args, servers, transport, prepare_run_dir(out), module, divide_lr)
    outcomes = _run_all(plan, entries)
    results = [outcome for outcome in outcomes if isinstance(outcome, Result)]
    note = _MEASURED if transport == "tcp" else f"{_MEASURED}\n{_SHARED}"
    picture, numbers = plan.folder / "comparison.png", plan.folder / "comparison.json"
    draw_comparison(results, picture, title or f"{module or path.name} under {len(results)} strategies", note)
    numbers.write_bytes(as_json.format(as_json.encode(comparison_json(outcomes))) + b"\n")
    _tell(plan, outcomes, note)
    return 0 if len(results) == len(outcomes) else 1


def _run_all(plan: RunPlan, entries: Sequence[ComparedEntry]) -> list[Result | RunEnded]:
    """Run one after another; a signal that stops a run ends the comparison."""
    outcomes: list[Result | RunEnded] = []
    for number, entry in enumerate(entries, start=1):
        print(f"[{number}/{len(entries)}] {entry}", file=sys.stderr, flush=True)
        ended = run_entry(plan, entry)
        if ended.was_interrupted:
            raise KeyboardInterrupt
        outcomes.append(ended if ended.code else read_result(entry, read_run(plan.run_dir(entry))))
    return outcomes


def _tell(plan: RunPlan, outcomes: Sequence[Result | RunEnded], note: str) -> None:
    print_tables([comparison_table(outcomes)])
    for outcome in outcomes:
        if isinstance(outcome, RunEnded):
            print(f"{outcome.entry} failed: {outcome.failure_reason}\n  its output   {plan.output(outcome.entry)}")
    print(f"{note}\n  the picture  {plan.folder / 'comparison.png'}")
