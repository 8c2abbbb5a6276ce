"""The launcher as a process of its own, with a fake server: what `paceline run` is, for tests that send it signals.

`python driver.py '{"script": ..., "args": [...], "behaviour": ..., "crash_policy": {...}, ...}'`
"""

import json
import signal
import sys
from pathlib import Path
from typing import Any

from paceline.launch import supervise
from paceline.launch.crash_policy import CrashPolicy
from paceline.launch.local import run_local
from paceline.launch.output import occupy_closed_streams
from paceline.launch.plan import LocalRun, Programs

SERVER = Path(__file__).with_name("fake_server.py")
GRACE_S = 60.0  # a busy machine ends nothing that is about to end by itself


def main(settings: dict[str, Any]) -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell ignores it, and so would we
    supervise.SAVING_S = settings.pop("saving_s", supervise.SAVING_S)
    behaviour = settings.pop("behaviour", "")
    words = (f"--behaviour={behaviour}",) if behaviour else ()
    data_behaviour = settings.pop("data_behaviour", "")
    programs = Programs(
        server=(sys.executable, str(SERVER), *words),
        data_server=(sys.executable, str(SERVER), f"--behaviour={data_behaviour}", "--role=data"),
        threads=(sys.executable, "-m", "paceline.launch.worker"),
    )
    run_dir = settings.pop("run_dir", None)
    return run_local(
        LocalRun(
            script=Path(settings.pop("script")),
            args=tuple(settings.pop("args", ())),
            run_dir=None if run_dir is None else Path(run_dir),
            crash_policy=CrashPolicy(
                **{"grace_s": settings.pop("grace_s", GRACE_S), **settings.pop("crash_policy", {})}
            ),
            **settings,
        ),
        programs,
    )


if __name__ == "__main__":
    occupy_closed_streams()  # as `paceline` does
    sys.exit(main(json.loads(sys.argv[1])))
