"""`paceline replay`: a recorded run again, server by server, without its workers. Light, as `run` is."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.launch.replaying import Replayed
    from paceline.server.record_follower import Moment

_SHOWN = 8  # numbers of a tensor
_DIGEST = 16  # characters of a digest


def replay(
    run_dir: Path,
    /,
    *,
    server: int | None = None,
    until: str | None = None,
    step: Annotated[bool, Parameter(negative="")] = False,
    show: str | None = None,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Repeat what the servers of a run with --record did, to the bit, without its workers.

    At the end the values are compared with those that each server had. Rules and functions of the script's own have to
    be importable: set PYTHONPATH to the folder of the script.

    Parameters
    ----------
    run_dir
        Folder of the run.
    server
        Rank of the only server to replay.
    until
        Stop where this first happens: nan (a value that is not finite), stale:CLOCKS (a read of values that are more
        clocks old) or clock:NUMBER.
    step
        Write a line for each event; on a terminal, wait for Enter after each, until q or Ctrl-D.
    show
        Name of a table whose values are shown where the replay ends.
    json
        One JSON object for each server instead of lines.
    """
    from paceline.launch.replaying import describe, parse_condition, recorded_servers, replay_server

    ranks = recorded_servers(run_dir)
    if server is not None and server not in ranks:
        raise UsageError(f"--server is {server}, expected one that has a record: {', '.join(map(str, ranks))}")
    condition = None if until is None else parse_condition(until)

    def watch(moment: "Moment") -> str:
        reason = "" if condition is None else condition.met(moment)
        if step:
            print(describe(moment))
            if not reason and sys.stdin.isatty() and sys.stdin.readline().strip(" \t") in ("q\n", "q", ""):
                return "as you said"
        return reason

    for rank in ranks if server is None else [server]:
        lines: list[str] = []
        replayed = replay_server(run_dir, rank, watch, lambda moment: lines.extend(_shown(moment, show)))  # noqa: B023
        print("\n".join(_as_json(replayed) if json else [*_told(replayed, until), *lines]))


def _told(replayed: "Replayed", until: str | None) -> list[str]:
    name = f"server {replayed.server}"
    if replayed.stopped:
        lines = [f"{name}: stopped after event {replayed.num_events}: {replayed.stopped}"]
    elif replayed.is_proved:
        lines = [f"{name}: {replayed.num_events} events; its values are those that it had at the end, to the bit"]
    else:
        why = replayed.end or "its process was killed, and has written no digests to compare with"
        lines = [f"{name}: {replayed.num_events} events, to the end of its record: {why}"]
    if until is not None and not replayed.stopped:
        lines.append(f"{name}: '{until}' did not come")
    lines += [
        f"  table '{table}': clock {clock}, sha256 {replayed.digests.get(table, '-')[:_DIGEST]}"
        for table, clock in replayed.clocks.items()
    ]
    return lines


def _as_json(replayed: "Replayed") -> list[str]:
    import msgspec

    return [msgspec.json.encode(replayed).decode()]


def _shown(moment: "Moment", table: str | None) -> list[str]:
    """Return lines on the values of a table and the state of its rule."""
    if table is None:
        return []
    from paceline.launch.replaying import tensors_of
    from paceline.update.dtypes import dtype_name

    lines: list[str] = []
    for name, tensor in tensors_of(moment, table).items():
        flat = tensor.flatten()
        some = ", ".join(f"{number:.6g}" for number in flat[:_SHOWN].tolist())
        more = ", ..." if len(flat) > _SHOWN else ""
        lines.append(f"  {table}.{name} {tuple(tensor.shape)} {dtype_name(tensor.dtype)}: {some}{more}")
        if tensor.is_floating_point() and len(flat):
            lines.append(
                f"    from {flat.min():.6g} to {flat.max():.6g}, mean {flat.double().mean():.6g}, "
                f"{int((~flat.isfinite()).sum())} not finite"
            )
    return lines
