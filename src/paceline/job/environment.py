"""The environment variables: the one place in Paceline that reads them or hands them on."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from paceline.core.settings import WAIT_TIMEOUT_S
from paceline.errors import UsageError

SPEC: Final = "PACELINE_SPEC"
RANK: Final = "PACELINE_RANK"
LOCAL_RANK: Final = "PACELINE_LOCAL_RANK"
INCARNATION: Final = "PACELINE_INCARNATION"
OWNER: Final = "PACELINE_OWNER_PID"  # the process whose place the variables above name
LAUNCHER: Final = "PACELINE_LAUNCHER_PID"
SERVING: Final = "PACELINE_SERVING"
SERVERS: Final = "PACELINE_SERVERS"
MEMORY: Final = "PACELINE_MEMORY_FD"
RUN_DIR: Final = "PACELINE_RUN_DIR"
HOST: Final = "PACELINE_HOST"
START_TIMEOUT: Final = "PACELINE_START_TIMEOUT_S"
TIMEOUT: Final = "PACELINE_TIMEOUT_S"
PLAIN_COLLECTIVES: Final = "PACELINE_PLAIN_COLLECTIVES"
COLLECTIVES: Final = "PACELINE_COLLECTIVES"
CHECK_MEMORY: Final = "PACELINE_CHECK_MEMORY"
SNAPSHOTS: Final = "PACELINE_SNAPSHOTS"
SNAPSHOT_EVERY: Final = "PACELINE_SNAPSHOT_EVERY"
RESUME: Final = "PACELINE_RESUME"
KEEP_RUNS: Final = "PACELINE_KEEP_RUNS"
TRACEBACK: Final = "PACELINE_TRACEBACK"
NUM_THREADS: Final = "OMP_NUM_THREADS"
IMPORT_PATH: Final = "PYTHONPATH"
LOOK_FOR_CUDA_ONLY: Final = "PYTORCH_NVML_BASED_CUDA_CHECK"  # torch's: count devices without opening them


class Place(msgspec.Struct, frozen=True):
    """Where this worker stands in a launched job.

    `incarnation` starts at 0 and grows by one each time the worker's process is started again.
    """

    spec_path: Path
    rank: int
    local_rank: int
    incarnation: int = 0

    def next(self) -> "Place":
        """Return the same place for the next incarnation of its worker."""
        return replace(self, incarnation=self.incarnation + 1)

    def as_environment(self) -> dict[str, str]:
        """Return the variables from which `find_place` finds this place again."""
        return {
            SPEC: str(self.spec_path),
            RANK: str(self.rank),
            LOCAL_RANK: str(self.local_rank),
            INCARNATION: str(self.incarnation),
        }


def find_place(variables: Mapping[str, str] = os.environ) -> Place | None:
    """Return this process's place in a launched job; None where it was not launched, or inherited what names a place.

    Raises UsageError when the variables are incomplete or not numbers.

    >>> find_place({}) is None
    True
    >>> find_place({"PACELINE_SPEC": "/run/cluster.json", "PACELINE_RANK": "2"}).rank
    2
    """
    spec_path = variables.get(SPEC)
    if spec_path is None or inherited_from(variables) is not None:
        return None
    rank = whole_number(variables, RANK)
    return Place(
        spec_path=Path(spec_path),
        rank=rank,
        local_rank=whole_number(variables, LOCAL_RANK, default=rank),
        incarnation=whole_number(variables, INCARNATION, default=0),
    )


def claim_place() -> None:
    """Note that this process takes the place that its environment names: those that it starts inherit the variables."""
    os.environ[OWNER] = str(os.getpid())


def inherited_from(variables: Mapping[str, str] = os.environ) -> int | None:
    """Return the process that has the place which the environment names, where it is not this one.

    >>> inherited_from({"PACELINE_OWNER_PID": "1"}), inherited_from({})
    (1, None)
    """
    owner = whole_number(variables, OWNER) if OWNER in variables else os.getpid()
    return None if owner == os.getpid() else owner


def inherited(variables: Mapping[str, str] = os.environ) -> Mapping[str, str]:
    """Return the environment variables of this process."""
    return dict(variables)


def asked_servers(variables: Mapping[str, str] = os.environ) -> str | None:
    """Return where the user wants servers in a job that another launcher starts, or None."""
    return variables.get(SERVERS) or None


def asked_folder(variables: Mapping[str, str] = os.environ) -> Path | None:
    """Return where the user wants folders of jobs that another launcher starts, or None."""
    return Path(variables[RUN_DIR]).absolute() if variables.get(RUN_DIR) else None


def asked_host(variables: Mapping[str, str] = os.environ) -> str | None:
    """Return at which address or name the user wants other machines to reach this one, or None."""
    return variables.get(HOST) or None


def start_timeout_s(default: float, variables: Mapping[str, str] = os.environ) -> float:
    """Return how long processes that another launcher starts wait for each other."""
    return float(whole_number(variables, START_TIMEOUT)) if variables.get(START_TIMEOUT) else default


def wait_timeout_s(variables: Mapping[str, str] = os.environ) -> float:
    """Return how long a worker waits for others at least, before it gives up.

    >>> wait_timeout_s({"PACELINE_TIMEOUT_S": "1800"}), wait_timeout_s({})
    (1800.0, 600.0)
    """
    seconds = whole_number(variables, TIMEOUT) if variables.get(TIMEOUT) else WAIT_TIMEOUT_S
    if not seconds:
        raise UsageError(f"the environment variable {TIMEOUT} must be more than 0 seconds")
    return float(seconds)


def asked_snapshots(variables: Mapping[str, str] = os.environ) -> tuple[Path | None, str | None, Path | None]:
    """Return where the user wants snapshots, how often, and where to go on from, under another launcher.

    >>> asked_snapshots({"PACELINE_SNAPSHOTS": "/runs/a", "PACELINE_SNAPSHOT_EVERY": "10m"})
    (PosixPath('/runs/a'), '10m', None)
    """

    def folder(name: str) -> Path | None:
        return Path(variables[name]).absolute() if variables.get(name) else None

    return folder(SNAPSHOTS), variables.get(SNAPSHOT_EVERY) or None, folder(RESUME)


def allows_plain_collectives(variables: Mapping[str, str] = os.environ) -> bool:
    """Return whether the user lets collective calls between machines travel unencrypted."""
    return variables.get(PLAIN_COLLECTIVES, "0") not in ("", "0")


def asks_for_gloo(variables: Mapping[str, str] = os.environ) -> bool:
    """Return whether collective calls go over Gloo where shared memory would do; raises UsageError for other words.

    >>> asks_for_gloo({"PACELINE_COLLECTIVES": "gloo"}), asks_for_gloo({})
    (True, False)
    """
    asked = variables.get(COLLECTIVES, "")
    if asked not in ("", "gloo", "shm"):
        raise UsageError(f"the environment variable {COLLECTIVES} is {asked!r}, expected 'shm' or 'gloo'")
    return asked == "gloo"


def kept_runs_folder(variables: Mapping[str, str] = os.environ) -> Path | None:
    """Return where records of runs without a folder of their own are kept; None if they are not, or there is no home.

    >>> kept_runs_folder({"XDG_STATE_HOME": "/state"}), kept_runs_folder({"HOME": "/root", "PACELINE_KEEP_RUNS": "0"})
    (PosixPath('/state/paceline/runs'), None)
    """
    if variables.get(KEEP_RUNS) == "0":
        return None
    home = variables.get("HOME", "")
    state = variables.get("XDG_STATE_HOME") or (f"{home}/.local/state" if home else "")
    return Path(state) / "paceline" / "runs" if state.startswith("/") else None


def cache_folder(variables: Mapping[str, str] = os.environ) -> Path:
    """Return where this user's processes meet when no folder was asked for; raises UsageError where there is no home.

    >>> cache_folder({"XDG_CACHE_HOME": "/cache"})
    PosixPath('/cache/paceline/jobs')
    """
    try:
        return Path(variables.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline" / "jobs"
    except RuntimeError as error:
        raise UsageError(
            f"user {os.geteuid()} has no home, where processes of a job meet unless told otherwise: set HOME, or name "
            "another folder, PACELINE_RUN_DIR=..."
        ) from error


def find_launcher(variables: Mapping[str, str] = os.environ) -> int | None:
    """Return the process id of the launcher that started this process, or None when there is none."""
    return whole_number(variables, LAUNCHER) if LAUNCHER in variables else None


def mark_as_server() -> None:
    """Note, for all that this process imports or starts, that it is a server and trains nothing."""
    os.environ[SERVING] = "1"


def is_serving(variables: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process is a server."""
    return SERVING in variables


def memory_descriptor(variables: Mapping[str, str] = os.environ) -> int | None:
    """Return the descriptor by which this process reaches memory that outlives it, where it has one.

    >>> memory_descriptor(memory_variable(7)), memory_descriptor({})
    (7, None)
    """
    return int(variables[MEMORY]) if MEMORY in variables else None


def memory_variable(descriptor: int | None) -> dict[str, str]:
    """Return what tells a process the descriptor by which it reaches memory that outlives it, if there is one."""
    return {} if descriptor is None else {MEMORY: str(descriptor)}


def chose_num_threads(variables: Mapping[str, str] = os.environ) -> bool:
    """Return whether the user has said with how many threads a process computes."""
    return NUM_THREADS in variables


def wants_traceback(variables: Mapping[str, str] = os.environ) -> bool:
    """Return whether the user asked to be shown where errors come from."""
    return bool(variables.get(TRACEBACK))


def checks_memory(variables: Mapping[str, str] = os.environ) -> bool:
    """Return whether nodes look after the memory that they lend, which takes time: every test of Paceline runs so.

    >>> checks_memory({"PACELINE_CHECK_MEMORY": "1"}), checks_memory({})
    (True, False)
    """
    return variables.get(CHECK_MEMORY, "0") not in ("", "0")


def child_environment(
    num_processes: int, num_cores: int, variables: Mapping[str, str] = os.environ, *, traceback: bool = False
) -> dict[str, str]:
    """Return what every process of a local job inherits.

    Processes that share a machine share its cores: unless the user chose a number, each computes with
    `num_cores // num_processes` threads, at least one. Output is not held back, so that what a process said
    before it was killed is not lost.
    """
    fair_share = max(1, num_cores // num_processes)
    defaults = {NUM_THREADS: str(fair_share), "PYTHONUNBUFFERED": "1"}
    asked = {TRACEBACK: "1"} if traceback else {}
    return {**defaults, **variables, **python_options(), **asked, LAUNCHER: str(os.getpid())}


def python_options() -> dict[str, str]:
    """Return the options of this Python as variables, so that processes that it starts run under the same.

    `python -X dev -O -W error` becomes PYTHONDEVMODE=1, PYTHONOPTIMIZE=1 and PYTHONWARNINGS=error.
    """
    told = {
        "PYTHONDEVMODE": int(sys.flags.dev_mode),
        "PYTHONOPTIMIZE": sys.flags.optimize,
        "PYTHONDONTWRITEBYTECODE": int(sys.flags.dont_write_bytecode),
        "PYTHONNOUSERSITE": int(sys.flags.no_user_site),
    }
    warned = {"PYTHONWARNINGS": ",".join(sys.warnoptions)} if sys.warnoptions else {}
    return {**{name: str(value) for name, value in told.items() if value}, **warned}


def with_import_path(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Let a process import what lies beside the script, such as an update rule of the user's own."""
    inherited = environment.get(IMPORT_PATH)
    return {**environment, IMPORT_PATH: os.pathsep.join(filter(None, (str(folder), inherited)))}


def same_imports(variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables of a process that finds the modules that this one finds, in the same places."""
    return {**variables, IMPORT_PATH: os.pathsep.join(os.path.abspath(folder) for folder in sys.path)}


def import_folders(variables: Mapping[str, str] = os.environ) -> list[str]:
    """Return the folders that the user wants modules to be looked for in first, as Python takes them.

    >>> import_folders({"PYTHONPATH": "/a:/b/../c"}), import_folders({})
    (['/a', '/c'], [])
    """
    text = variables.get(IMPORT_PATH)
    return [os.path.abspath(folder) for folder in text.split(os.pathsep)] if text else []


def fork_server_environment(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return what the fork server gets, which imports for scripts in this folder and must not open devices for them."""
    return with_import_path({**environment, LOOK_FOR_CUDA_ONLY: "1"}, folder)


def replace_all(variables: Mapping[str, str]) -> None:
    """Give this process other variables instead of all that it has."""
    os.environ.clear()
    os.environ.update(variables)


def set_missing(variables: Mapping[str, str]) -> None:
    """Set what is not set; for a library that is told things by variables alone."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def tell_ranks(rank: int, size: int, local_rank: int, local_size: int) -> None:
    """Set the variables of torchrun, by which frameworks know their ranks; the main address only where it is missing.

    They do not connect by that address, as torch has its process group already.
    """
    ranks = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_size}
    os.environ.update({name: str(number) for name, number in ranks.items()})
    set_missing({"MASTER_ADDR": "localhost"})


def ray_authenticates(variables: Mapping[str, str] = os.environ) -> bool:
    """Return whether a Ray cluster authenticates its clients, as far as this process was told."""
    return variables.get("RAY_AUTH_MODE", "disabled").lower() != "disabled"


def wants_colour(variables: Mapping[str, str] = os.environ) -> bool:
    """Return whether the user leaves colours on (NO_COLOR is unset or empty, the terminal is not dumb)."""
    return not variables.get("NO_COLOR") and variables.get("TERM") != "dumb"


def whole_number(variables: Mapping[str, str], name: str, *, default: int | None = None) -> int:
    """Return the number in a variable, which has to be there unless there is a default; raises UsageError."""
    text = variables.get(name, "" if default is None else str(default))
    if not text.isdecimal():
        raise UsageError(f"the environment variable {name} must be a whole number >= 0, got {text!r}")
    return int(text)
