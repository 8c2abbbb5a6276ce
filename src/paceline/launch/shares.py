"""How much of every table each server is to hold: as the user says, or by what servers managed in a former run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from paceline.core.partition import Effort, shares_by_speed
from paceline.errors import UsageError
from paceline.job.addresses import SPEC_NAME
from paceline.job.spec import ClusterSpec
from paceline.observe.runs import read_run
from paceline.observe.trace import Load

MEASURED: Final = "measured:"


def read_shares(text: str | None, num_servers: int) -> tuple[tuple[float, ...], str]:
    """Return the shares of "2,1,1" or "measured:RUN_DIR", and a line that explains measured ones.

    Whether named ones are the right ones is seen later.

    Raises:
        UsageError: the text is neither, or that folder has no such run.
    """
    if text is None:
        return (), ""
    if text.startswith(MEASURED):
        return measured_shares(Path(text.removeprefix(MEASURED)), num_servers)
    try:
        return tuple(map(float, text.split(","))), ""
    except ValueError:
        raise UsageError(
            f"--shares is {text!r}, expected numbers such as 2,1,1, one for each server, or measured:RUN_DIR, the "
            "folder of a former run with as many servers"
        ) from None


def measured_shares(folder: Path, num_servers: int) -> tuple[tuple[float, ...], str]:
    """Return shares in proportion to the speed of each server in a former run, and say why.

    Raises:
        UsageError: that run had another number of servers, or did not come to its end.
    """
    spec = ClusterSpec.read(folder / SPEC_NAME)
    if spec.num_servers != num_servers:
        raise UsageError(f"the run in {folder} had {spec.num_servers} server(s), and this one has {num_servers}")
    loads = {load.server: load for load in read_run(folder).loads}
    missing = [str(server) for server in range(num_servers) if server not in loads]
    if missing:
        raise UsageError(
            f"the run in {folder} has no record of what server {', '.join(missing)} did: it is written when a run "
            "comes to its end"
        )
    ordered = [loads[server] for server in range(num_servers)]
    shares = shares_by_speed(spec.shares, [_effort(load) for load in ordered])
    return shares, f"shares by {folder}: {_explain(ordered, shares)}"


def _effort(load: Load) -> Effort:
    """Return what a server moved, and how long that took it: work and sending go on at the same time."""
    return Effort(load.received_bytes + load.sent_bytes, max(load.busy_s, load.sending_s))


def _explain(loads: Sequence[Load], shares: Sequence[float]) -> str:
    told: list[str] = []
    for load, share in zip(loads, shares, strict=True):
        effort = _effort(load)
        speed = f" at {effort.size_bytes / effort.busy_s / 1e6:.0f} MB/s" if effort.busy_s else ""
        busy = min(1.0, effort.busy_s / load.in_use_s) if load.in_use_s else 0.0
        told.append(f"server {load.server} was busy {busy:.0%}{speed} and gets {share:.2f}")
    return ", ".join(told)
