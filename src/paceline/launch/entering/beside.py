"""The servers that a worker starts beside itself."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Final, final

from paceline.errors import PeerError
from paceline.launch.environment import inherited, with_import_path
from paceline.launch.policy import describe_exit

ENTRY: Final = "paceline.launch.entering.attendant"


@final
class Beside:
    """Server processes, children of this one, that end with it."""

    def __init__(self, run_dir: Path, ranks: range, host: str) -> None:
        """Start them; where they listen by TCP, at an address of this machine, `host`."""
        # What lies beside the script, an update rule of the user's own for example, is there for a server too.
        environment = with_import_path(inherited(), Path(sys.path[0]).absolute())
        self._processes = {
            rank: subprocess.Popen(
                [sys.executable, "-m", ENTRY, str(run_dir), str(rank), host],
                stdin=subprocess.PIPE,
                env=environment,
                start_new_session=True,
            )
            for rank in ranks
        }

    @property
    def pids(self) -> list[int]:
        """Their numbers; each leads a process group."""
        return [process.pid for process in self._processes.values()]

    def check(self) -> None:
        """Raise PeerError when one of them has ended."""
        for rank, process in self._processes.items():
            code = process.poll()
            if code is not None:
                raise PeerError(f"server {rank} {describe_exit(code)} before the job began; look at what it wrote")

    def wait(self, timeout_s: float) -> None:
        """Block until they have ended by themselves, at most so long."""
        deadline_s = time.monotonic() + timeout_s
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                return

    def end(self) -> None:
        """End those that still run, at once."""
        for process in self._processes.values():
            process.kill()
            assert process.stdin is not None
            process.stdin.close()
            process.wait()
