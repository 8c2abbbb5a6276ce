"""Three workers whose calls do not match, then one that dies in a call: what the others are told, one line each."""

import os
import signal

import torch

import paceline
from paceline.errors import PacelineError

paceline.init()
rank = paceline.rank()


def tell(what: str, error: PacelineError) -> None:
    print(f"{what}: {type(error).__name__}: {error}")


assert paceline.all_reduce(torch.ones(2)).tolist() == [3.0, 3.0]
for what, call in (
    ("shape", lambda: paceline.all_reduce(torch.ones(3 if rank == 1 else 2))),
    ("pattern", lambda: paceline.broadcast(torch.ones(2)) if rank == 1 else paceline.all_reduce(torch.ones(2))),
):
    try:
        call()
    except PacelineError as error:
        tell(what, error)
assert paceline.all_reduce(torch.ones(2)).tolist() == [3.0, 3.0]  # nothing was sent, so all goes on
if rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
for what in ("death", "after"):
    try:
        paceline.all_reduce(torch.ones(2), timeout_s=20.0)
    except PacelineError as error:
        tell(what, error)
