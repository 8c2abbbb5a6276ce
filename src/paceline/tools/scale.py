"""`paceline scale`: change the number of workers of a job while it runs. Light, as `run` is."""

import sys
from pathlib import Path
from typing import Annotated, Final

from cyclopts import Parameter

TIMEOUT_S: Final = 60.0


def scale(run_dir: Path, /, *, workers: Annotated[int, Parameter(alias="-n")]) -> None:
    """Change the number of workers of a run that was started with `--workers 2:8` and `--run-dir`.

    New workers run the script from its beginning and take part from the next clock on; surplus workers finish their
    step and leave. The others do not wait.

    Parameters
    ----------
    run_dir
        The folder of the run.
    workers
        How many workers there are to be.
    """
    from paceline.launch.places import request_workers

    sys.stdout.write(f"paceline: {request_workers(run_dir, workers, TIMEOUT_S)}\n")
