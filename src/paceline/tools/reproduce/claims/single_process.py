"""Anchor A2: bsp with several workers ends with the bits of one process that does the same."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Final

import numpy as np
import torch

from paceline.api.programs import PROGRAMS
from paceline.errors import PacelineError
from paceline.launch.local import run_local
from paceline.launch.plan import LocalRun
from paceline.tools.reproduce.claim import Check, Claim, ClaimOptions, Curve, Finding, Plot
from paceline.tools.reproduce.lockstep_worker import RATE, SIZE, gradient

_STEPS: Final = 100
_WORKERS: Final = 2  # a sum of two numbers does not depend on their order
_SCRIPT: Final = Path(__file__).parents[1] / "lockstep_worker.py"


def _run(options: ClaimOptions) -> Finding:
    ours, alone = _job(options.seed), torch.zeros(SIZE)
    double = torch.zeros(SIZE, dtype=torch.float64)
    gaps: list[float] = []
    for step in range(_STEPS):
        parts = [gradient(alone, worker, step, options.seed) for worker in range(_WORKERS)]
        alone -= RATE * (torch.stack(parts).sum(0) / _WORKERS)
        double -= RATE * torch.stack(
            [gradient(double.float(), worker, step, options.seed) for worker in range(_WORKERS)]
        ).double().mean(0)
        gaps.append(float((alone - double).abs().max()) + 1e-12)
    equal = int((ours == alone).sum())
    return Finding(
        (
            Check("numbers whose bits are those of one process", f"all {SIZE}", str(equal), equal == SIZE),
            Check("the most that one differs", "0", f"{float((ours - alone).abs().max()):.0e}", equal == SIZE),
        ),
        (
            Plot(
                "How far rounding alone would take float32 from float64",
                "step",
                "largest difference",
                (Curve("one process", tuple(map(float, range(_STEPS))), tuple(gaps)),),
                is_log_y=True,
            ),
            Plot(
                "Values at the end",
                "number",
                "weight",
                (
                    Curve("2 workers and a server", tuple(map(float, range(SIZE))), tuple(map(float, ours))),
                    Curve("one process", tuple(map(float, range(SIZE))), tuple(map(float, alone)), is_reference=True),
                ),
            ),
        ),
        f"{_WORKERS} worker processes and a server under bsp, {_STEPS} steps of SGD with the mean of both "
        "gradients, beside a loop of torch over the same micro-batches.",
        (f"paceline run --workers {_WORKERS} --consistency bsp {_SCRIPT.name} -- {_STEPS} {options.seed} values.npy",),
    )


def _job(seed: int) -> torch.Tensor:
    with tempfile.TemporaryDirectory(prefix="paceline-lockstep-") as folder:
        path = Path(folder) / "values.npy"
        job = LocalRun(
            script=_SCRIPT,
            args=(str(_STEPS), str(seed), str(path)),
            num_workers=_WORKERS,
            num_servers=1,
            consistency="bsp",
            run_dir=Path(folder) / "run",
            progress=False,
            quiet=True,
        )
        code = run_local(job, PROGRAMS)
        if code:
            raise PacelineError(f"the job of {_WORKERS} workers ended with exit code {code}")
        return torch.from_numpy(np.load(path))


CLAIM: Final = Claim(
    "A2",
    "BSP over processes ends with the bits of a single process",
    "the definition of BSP",
    "bit-identical after 100 steps",
    "real",
    (0.2, 0.2),
    _run,
    ("A2",),
)
