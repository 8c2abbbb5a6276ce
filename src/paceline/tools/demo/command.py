"""`paceline demo`: run everything, one after another, and write the report."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from cyclopts import Parameter

from paceline.api.programs import PROGRAMS
from paceline.errors import UsageError
from paceline.launch.local import run_local
from paceline.observe.report import LabelledRun, write_report
from paceline.observe.runs import read_run
from paceline.observe.summary import RunSummary, summarize
from paceline.observe.text_tables import print_tables
from paceline.tools.demo.runs import BATCH, COMPUTE_S, RATE, RUN_NAMES, DemoRun, RunName, Setting, describe, plan

if TYPE_CHECKING:
    from rich.table import Table

_EXTRAS: Final = {"scikit-learn": "sklearn", "matplotlib": "matplotlib"}
NUM_DIGITS: Final = 1797
NUM_TRAINING: Final = 1440  # divides evenly by many numbers of workers


def check_extras() -> None:
    """Raise UsageError when what the demo needs beyond Paceline itself is not installed."""
    missing = [package for package, module in _EXTRAS.items() if find_spec(module) is None]
    if missing:
        raise UsageError(f"The demo needs {' and '.join(missing)}, not installed here: pip install 'paceline[demo]'.")


def write_digits(path: Path, seed: int) -> None:
    """Write the digits in a shuffled order: images (1797, 64) float32 in 0..1 and labels (1797,) int64."""
    import numpy as np
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(labels))
    np.savez(
        path,
        images=(images[order] / 16).astype(np.float32),
        labels=labels[order].astype(np.int64),
        num_training=np.array(NUM_TRAINING),
    )


TITLE = "Handwritten digits under four consistency models, and all-reduce"


def demo(
    *,
    report: Path = Path("report"),
    workers: int = 4,
    servers: int = 2,
    epochs: int = 6,
    seed: int = 0,
    only: Annotated[tuple[RunName, ...], Parameter(negative="")] = (),
) -> int:
    """Train a classifier of handwritten digits under four consistency models and all-reduce, and write a report.

    One worker is slow at times. The report says what that costs under each model: open report.html in a browser.

    Parameters
    ----------
    report
        Folder for report.html and report.png.
    workers
        Number of worker processes.
    servers
        Number of server processes.
    epochs
        How often the training examples are gone through.
    seed
        Seed of the shuffles, of the initial parameters, and of when the slow worker is slow.
    only
        Run only these; may be given several times.
    """
    if workers < 2 or epochs < 1:
        raise UsageError(f"the demo compares 2 or more workers over 1 or more epochs; got {workers} and {epochs}")
    if seed < 0:
        raise UsageError(f"--seed is {seed}, expected 0 or more")
    check_extras()
    try:
        report.mkdir(parents=True, exist_ok=True)  # first: what trains for minutes is not to fail at its end
    except OSError as error:
        raise UsageError(f"cannot write the report to {report}: {error.strerror}; name another --report") from error
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="paceline-demo-") as folder:
        setting = Setting(Path(folder) / "digits.npz", workers, servers, epochs, seed)
        write_digits(setting.data, seed)
        runs = [plan(name, setting, Path(folder) / name) for name in RUN_NAMES if name in only or not only]
        code = _run_all(runs)
        if code:
            return code
        done = [LabelledRun(run.label, read_run(run.run_dir), run.note) for run in runs]
    page = write_report(done, report, title=TITLE, facts=_facts(setting))
    _tell(done, page, time.monotonic() - began_s)
    return 0


def _run_all(runs: Sequence[DemoRun]) -> int:
    """Run one after another; return the exit code of the first that fails, else 0."""
    for number, run in enumerate(runs, start=1):
        print(f"[{number}/{len(runs)}] {run.label}: {run.note}", file=sys.stderr, flush=True)
        code = run_local(run.launch, PROGRAMS)
        if code:
            print(f"paceline: the run '{run.label}' ended with exit code {code}; no report", file=sys.stderr)
            return code
    return 0


def _facts(setting: Setting) -> dict[str, str]:
    """Say what was trained and how, for the report."""
    num_test = NUM_DIGITS - NUM_TRAINING
    return {
        "data": f"{NUM_TRAINING} digits of scikit-learn to train, {num_test} to test (each is {1 / num_test:.2%})",
        "workers, servers": f"{setting.num_workers}, {setting.num_servers}",
        "each clock": f"{BATCH} examples a worker, {COMPUTE_S * 1000:.0f} ms of computing (simulated by sleeping)",
        "slow worker": describe(COMPUTE_S),
        "learning rate": f"plain SGD, {RATE:g} falling to 0, for the mean of one clock's pushes, and "
        f"1/{setting.num_workers} of it where each push is an update: the same step for each example",
    }


def _tell(runs: Sequence[LabelledRun], page: Path, took_s: float) -> None:
    print_tables([_table(runs)])
    print(f"{took_s:.0f} s in all\n  the report    {page}\n  its pictures  {page.with_suffix('.png')}")


def _table(runs: Sequence[LabelledRun]) -> Table:
    """Return the comparison in few numbers."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("")
    for heading in ("seconds", "waiting", "freshest reads", "oldest read", "test accuracy"):
        table.add_column(heading, justify="right", header_style="dim")
    for labelled in runs:
        table.add_row(labelled.label, *_cells(summarize(labelled.run)))
    return table


def _cells(run: RunSummary) -> list[str]:
    return [
        f"{run.seconds:.1f}",
        f"{run.wait_share_mean:.0%}",
        "-" if run.freshest_share is None else f"{run.freshest_share:.0%}",
        "-" if run.max_staleness is None else f"{run.max_staleness} behind",
        "-" if run.test_accuracy is None else f"{run.test_accuracy:.2%}",
    ]
