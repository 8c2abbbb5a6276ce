"""`paceline join`: workers that join a run from another terminal or machine. Light, as `run` is."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def join(
    address: str,
    script: Path,
    /,
    *args: Annotated[str, Parameter(allow_leading_hyphen=True)],
    workers: Annotated[int, Parameter(alias="-n")] = 1,
    keys: Path | None = None,
    any_script: Annotated[bool, Parameter(negative="")] = False,
    quiet: Annotated[bool, Parameter(negative="")] = False,
    traceback: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Have workers join a run that was started with `--workers 2:8`, from another terminal or machine.

    They run the script from its beginning and take part from the next clock on; the others do not wait. Ctrl-C makes
    them finish their step and leave, and the run goes on. Options stand before the script.

    Parameters
    ----------
    address
        What the run prints at its start: its folder, on this machine, or HOST:PORT if it has --listen.
    script
        The script of the run, or -m and the name of its module.
    args
        Its arguments.
    workers
        How many workers join.
    keys
        Folder with a certificate and the token of the run, as `paceline keys issue` writes it, for HOST:PORT.
    any_script
        Join even if the script differs from that of the run.
    quiet
        Show only what the script prints, and errors.
    traceback
        Show whole tracebacks of errors, instead of one line that says what to do.
    """
    from paceline.api.programs import PROGRAMS
    from paceline.launch.joining.run import JoinOrder, join_run
    from paceline.tools.run import read_program

    path, module, words = read_program(script, args)
    order = JoinOrder(
        address=address,
        script=path,
        args=words,
        module=module,
        num_workers=workers,
        keys=keys,
        any_script=any_script,
        quiet=quiet,
        traceback=traceback,
    )
    return join_run(order, PROGRAMS)
