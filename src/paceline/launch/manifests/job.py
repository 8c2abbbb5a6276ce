"""The job that a manifest describes, validated before anything is written, as other programs execute the file."""

import re
import shlex
from pathlib import PurePath
from typing import Final

import msgspec

from paceline.errors import UsageError

NAME: Final = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
NAME_CHARS_MAX: Final = 47  # KubeRay appends to it, and no name of Kubernetes is longer than 63
DURATION: Final = re.compile(r"(?:([0-9]{1,3})-)?([0-9]{1,3}):([0-5][0-9]):([0-5][0-9])")


class ManifestJob(msgspec.Struct, frozen=True, kw_only=True):
    """A script as so many workers and servers on so many machines.

    Raises UsageError for what contradicts itself, and for text that others would take for something else.
    """

    script: str
    is_module: bool = False  # the script is the name of one, as `python -m` takes it
    args: tuple[str, ...] = ()
    name: str
    num_workers: int
    num_servers: int
    num_nodes: int
    num_cpus: int  # of each worker
    num_gpus: int  # of each worker
    limit_s: int

    def __post_init__(self) -> None:
        """Check it."""
        self._check_counts()
        if not NAME.fullmatch(self.name) or len(self.name) > NAME_CHARS_MAX:
            raise UsageError(
                f"--name is {self.name!r}, expected small letters, digits and inner hyphens, a letter first, at most "
                f"{NAME_CHARS_MAX} of them"
            )
        if not self.script:
            raise UsageError("the script has no name: name the one to run")
        if self.script.startswith("-"):
            raise UsageError(f"the script {self.script!r} would be taken for an option: write ./{self.script}")
        for text in (self.script, *self.args):
            if not text.isprintable():
                raise UsageError(
                    f"{text!r} has line ends or other signs that cannot be seen, which do not survive in a file of "
                    "commands: let the script read it from a file"
                )

    def _check_counts(self) -> None:
        for option, count, least in (
            ("--workers", self.num_workers, 1),
            ("--servers", self.num_servers, 1),
            ("--nodes", self.num_nodes, 1),
            ("--cpus", self.num_cpus, 1),
            ("--gpus", self.num_gpus, 0),
            ("--time in seconds", self.limit_s, 1),
        ):
            if count < least:
                raise UsageError(f"{option} must be at least {least}, got {count}")
        if self.num_nodes > self.num_workers:
            raise UsageError(
                f"--nodes is {self.num_nodes} and --workers {self.num_workers}: a node would have no worker. Take at "
                f"most {self.num_workers} nodes"
            )

    @property
    def command(self) -> str:
        """The script and its arguments, as a shell takes them."""
        return shlex.join((*(("-m",) if self.is_module else ()), self.script, *self.args))

    @property
    def summary(self) -> str:
        """The job in half a line."""
        parts = (self.num_workers, "worker"), (self.num_servers, "server"), (self.num_nodes, "node")
        workers, servers, nodes = (f"{count} {noun}" if count == 1 else f"{count} {noun}s" for count, noun in parts)
        return f"{workers} and {servers} on {nodes}"


def name_of(script: str) -> str:
    """Return a name for the job of a script.

    >>> name_of("src/Train_digits.py"), name_of("2.py")
    ('train-digits', 'job-2')
    """
    words = re.sub(r"[^a-z0-9]+", "-", PurePath(script).stem.lower()).strip("-")
    named = words if words[:1].isalpha() else f"job-{words}"
    return named[:NAME_CHARS_MAX].strip("-")


def read_limit(text: str) -> int:
    """Return the seconds of HH:MM:SS or D-HH:MM:SS; raises UsageError for anything else.

    >>> read_limit("01:30:00"), read_limit("1-00:00:10")
    (5400, 86410)
    """
    found = DURATION.fullmatch(text)
    if found is None:
        raise UsageError(f"--time is {text!r}, expected HH:MM:SS or D-HH:MM:SS, for example 01:00:00")
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
