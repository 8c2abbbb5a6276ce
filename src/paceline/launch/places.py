"""The places of workers that come and go while a job runs, and requests to its launcher for another number of them."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, final

from msgspec.structs import replace

from paceline.errors import DeadlineExceeded, PacelineError, UsageError
from paceline.job.addresses import SPEC_NAME
from paceline.job.folders import make_once, open_file, wait_for
from paceline.job.spec import TOKEN_NAME, ClusterSpec
from paceline.launch.child import Launch

REQUEST_NAME: Final = "workers.wanted"
ANSWER_NAME: Final = "workers.answer"
POLL_S: Final = 0.02
_MOST_DIGITS: Final = 9  # of a number of workers


@final
class WorkerPlaces:
    """The places that have no worker now, and what the launcher of the job is asked for."""

    def __init__(self, run_dir: Path, vacant: Sequence[Launch]) -> None:
        """Begin with these places; each says how a worker is started there."""
        self._run_dir = run_dir
        self._vacant = {launch.rank: launch for launch in vacant}

    def requested(self) -> int | None:
        """Return how many workers there are to be, if that was asked since the last call; does not block."""
        path = self._run_dir / REQUEST_NAME
        try:
            with open_file(path) as file:
                text = file.read(_MOST_DIGITS + 1)
        except FileNotFoundError:
            return None
        except OSError:
            text = b""  # it is not a file
        with suppress(OSError):
            path.unlink()
        return int(text) if text.isdigit() and len(text) <= _MOST_DIGITS else None

    def answer(self, text: str) -> None:
        """Tell the process that asked."""
        with suppress(OSError):  # a full disk, or the folder is gone: it says by itself that it was not answered
            make_once(self._run_dir / ANSWER_NAME, text.encode())

    def take(self, num: int, permits: Callable[[Launch], bool] = lambda _: True) -> list[Launch]:
        """Take up to so many places that are permitted, of the lowest ranks; return how workers are started there."""
        permitted = [rank for rank in sorted(self._vacant) if permits(self._vacant[rank])]
        return [self._vacant.pop(rank) for rank in permitted[:num]]

    def give_back(self, launch: Launch) -> None:
        """Note that the worker of this place has ended, so that another may come."""
        self._vacant[launch.rank] = replace(launch.anew(), origin="")


def read_elastic(run_dir: Path, num: int) -> ClusterSpec:
    """Read the spec of a run that is to have `num` workers; raises UsageError unless workers come and go in it."""
    spec = ClusterSpec.read(run_dir / SPEC_NAME)
    if spec.is_elastic:
        return spec
    raise UsageError(
        f"the run in {run_dir} keeps its {spec.num_workers} workers: start it with --workers "
        f"{spec.num_workers}:{max(num, spec.num_workers + 1)}, for example"
    )


def request_workers(run_dir: Path, num: int, timeout_s: float) -> str:
    """Ask the launcher of a run for so many workers, and return its answer; blocks for it.

    Raises:
        UsageError: it is no run, or has ended, its workers do not come and go, or it has no place for so many.
        DeadlineExceeded: the launcher has not answered in time.
        PacelineError: it has another request to answer.
    """
    spec = read_elastic(run_dir, num)
    if not 1 <= num <= spec.num_workers:
        raise UsageError(f"--workers is {num}, and the run in {run_dir} has places for 1 to {spec.num_workers} workers")
    if not (run_dir / TOKEN_NAME).exists():  # which is removed as the run ends, however it does
        raise UsageError(f"the run in {run_dir} has ended, and has no workers")
    request, answer = run_dir / REQUEST_NAME, run_dir / ANSWER_NAME
    answer.unlink(missing_ok=True)
    if not make_once(request, str(num).encode()):
        raise PacelineError(f"the launcher of {run_dir} has another request to answer: try again")
    try:
        text = wait_for(
            lambda: answer.read_text() if answer.exists() else None,
            timeout_s,
            lambda: f"the launcher of {run_dir} did not answer within {timeout_s:g} s: has the run ended?",
            POLL_S,
        )
    except DeadlineExceeded:
        request.unlink(missing_ok=True)
        raise
    answer.unlink(missing_ok=True)
    return text
