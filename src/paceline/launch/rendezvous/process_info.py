"""What a process of a job tells of itself in the folder of the job: where it is, and which paceline it runs."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Final

import msgspec

from paceline.job.machines import Machine, this_machine
from paceline.transport.frames import WIRE_VERSION
from paceline.version import __version__

VERSION: Final = f"{__version__} (wire version {WIRE_VERSION})"


class ProcessInfo(msgspec.Struct, frozen=True):
    """What a process tells of itself."""

    machine: Machine
    version: str = ""

    @staticmethod
    def own() -> "ProcessInfo":
        """Return that of this process."""
        return ProcessInfo(this_machine(), VERSION)

    def refusal(self, who: str) -> str | None:
        """Return why the process that has this card cannot be in one job with this one; None where it can."""
        if self.version == VERSION:
            return None
        return (
            f"{who} on {self.machine} runs paceline {self.version or 'of an unknown version'}, and this process on "
            f"{this_machine()} runs {VERSION}: install the same on all machines"
        )


def describe_machines(infos: Mapping[str, ProcessInfo]) -> str:
    """Say on which machine each is.

    >>> a, b = ProcessInfo(Machine("a")), ProcessInfo(Machine("b"))
    >>> describe_machines({"worker 0": a, "server 0": b, "worker 1": a})
    'worker 0 and worker 1 on a; server 0 on b'
    """
    found: defaultdict[Machine, list[str]] = defaultdict(list)
    for name, process_info in infos.items():
        found[process_info.machine].append(name)
    return "; ".join(f"{' and '.join(names)} on {machine}" for machine, names in found.items())
