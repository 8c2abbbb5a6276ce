"""The entry of a worker process: `python -m paceline.launch.worker script.py args...`, or `-m module args...`.

The script runs as it would under plain `python script.py args...`: as `__main__`, with its own folder first on the
import path; a module as under `python -m module args...`, with the working folder there. When it has ended, well or
not, this worker leaves the job: after an error without waiting for other workers.
"""

import os
import runpy
import sys
import threading

from paceline.errors import EXIT_INTERRUPTED
from paceline.job.environment import Place, claim_place, find_place
from paceline.launch.entry import die_with_launcher
from paceline.launch.script import OPTION, source_of
from paceline.launch.script_exit import ended_well, report_error, script_ended, tell_of_debugger, will_leave
from paceline.notices import tell


def main() -> None:
    """Run the script named on the command line."""
    die_with_launcher()
    claim_place()
    del sys.argv[0]
    script, module = sys.argv[0], None
    if script == OPTION:
        module = sys.argv.pop(1)
        script = str(source_of(module, sys.path))  # the working folder is the first: this was started as a module, too
    elif not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    sys.excepthook = lambda _kind, error, _origin: report_error(error, script)
    try:
        run_script(script, module)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except SystemExit as ending:
        tell_of_debugger(ending)
        raise


def run_script(script: str, module: str | None = None) -> None:
    """Run the script, as a module if it has a name, and leave the job; raises what the script, or the leaving, raised.

    Where threads of the script go on, the job is left when they have ended, as the interpreter waits for them, too.
    """
    place = find_place()
    try:
        if module is None:
            runpy.run_path(script, run_name="__main__")
        else:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            _tell_if_alone(place)
        script_ended(well=ended_well(error))
        raise
    if not _threads_go_on():
        _tell_if_alone(place)
        script_ended(well=True)


def _tell_if_alone(place: Place | None) -> None:
    """Tell, in the first of several workers, that the script has ended and has not trained together with its copies."""
    if will_leave() or place is None or place.rank or not place.spec_path.exists():
        return
    from paceline.job.spec import ClusterSpec  # deferred: a script that joins has it by then, and begins sooner

    num_workers = ClusterSpec.read(place.spec_path).num_workers
    if num_workers > 1:
        tell(
            f"the script has ended and has never joined the job: unless other workers have, each of the {num_workers} "
            "has run all of it for itself. Call paceline.distributed(optimizer), or paceline.init() and use its tables"
        )


def _threads_go_on() -> bool:
    return any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread())


if __name__ == "__main__":
    main()
