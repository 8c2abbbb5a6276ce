"""The launcher of this process, as its environment tells: torchrun, MPI, Slurm, or a description of a cluster."""

import hashlib
from collections.abc import Mapping
from typing import Final, Literal

import msgspec

from paceline.errors import UsageError
from paceline.job.environment import whole_number
from paceline.job.machines import is_loopback

Role = Literal["worker", "server", "scheduler"]
Variables = Mapping[str, str]

SLURM_STEPS_END: Final = 0xFFFF_FFF0  # from here on: the batch script, a shell of salloc and the like, no steps of srun
TORCHRUN: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
OPEN_MPI: Final = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
MPICH: Final = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "MASTER_ADDR", "MASTER_PORT")
SLURM: Final = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS")
TORCH: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
DMLC: Final = ("DMLC_ROLE", "DMLC_NUM_WORKER", "DMLC_NUM_SERVER", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT")


class Detected(msgspec.Struct, frozen=True, kw_only=True):
    """What a launcher says of this process.

    Where it has given out roles, `rank` and `size` count the workers alone (for a server, `rank` counts the servers).
    """

    launcher: str
    job: str  # no two jobs of one launcher that run at once have it in common
    rank: int | None  # None: in order of arrival
    size: int
    local_rank: int | None = None
    local_size: int | None = None
    node_rank: int | None = 0  # None: the launcher has not told
    num_nodes: int = 1
    counts_nodes: bool = True  # False: the launcher has not told, and `num_nodes` is the least
    restart: int = 0
    master: tuple[str, int] | None = None
    has_store: bool = False  # the launcher has a store of torch at `master`
    role: Role | None = None
    num_servers: int = 0

    @property
    def may_span(self) -> bool:
        """Whether the processes of the job may be on several machines."""
        return self.num_nodes > 1 or not self.counts_nodes

    @property
    def key(self) -> str:
        """What names this attempt at this job, in a file name too."""
        return "".join(sign if sign.isalnum() else "-" for sign in f"{self.launcher} {self.job} {self.restart}")


def detect(variables: Variables) -> Detected | None:
    """Return the place that a launcher has given this process, or None when there is none.

    A launcher that was started by another one counts, not the other. A shell inside a Slurm allocation is no job.

    Raises UsageError when a launcher contradicts itself, or has left out half of what it should say.

    >>> detect({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}) is None
    True
    """
    found = _find(variables)
    if found is not None:
        _check(found)
    return found


def _find(variables: Variables) -> Detected | None:
    if "TORCHELASTIC_RUN_ID" in variables:
        return _torchrun(variables)
    if "OMPI_COMM_WORLD_RANK" in variables or "OMPI_COMM_WORLD_SIZE" in variables:
        return _open_mpi(variables)
    if "MPI_LOCALNRANKS" in variables:  # before Slurm, through which MPICH may have started its own helpers
        return _mpich(variables)
    if _in_slurm_step(variables):
        return _slurm(variables)
    if "DMLC_ROLE" in variables:
        return _dmlc(variables)
    if variables.get("TF_CONFIG"):
        return _tensorflow(variables["TF_CONFIG"])
    if "RANK" in variables or "WORLD_SIZE" in variables:
        return _torch(variables)
    return None


def _torchrun(variables: Variables) -> Detected:
    _require(variables, "torchrun", TORCHRUN)
    return Detected(
        launcher="torchrun",
        job=f"{variables['TORCHELASTIC_RUN_ID']} {variables['MASTER_ADDR']} {variables['MASTER_PORT']}",
        rank=whole_number(variables, "RANK"),
        size=whole_number(variables, "WORLD_SIZE"),
        local_rank=whole_number(variables, "LOCAL_RANK"),
        local_size=whole_number(variables, "LOCAL_WORLD_SIZE"),
        node_rank=whole_number(variables, "GROUP_RANK"),
        num_nodes=whole_number(variables, "GROUP_WORLD_SIZE", default=1),
        restart=whole_number(variables, "TORCHELASTIC_RESTART_COUNT", default=0),
        master=(variables["MASTER_ADDR"], whole_number(variables, "MASTER_PORT")),
        has_store=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _open_mpi(variables: Variables) -> Detected:
    _require(variables, "Open MPI", OPEN_MPI)
    size, local_size = whole_number(variables, OPEN_MPI[1]), whole_number(variables, OPEN_MPI[3])
    name = next(filter(variables.get, ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")), "PMIX_NAMESPACE")
    _require(variables, "Open MPI", (name,))
    return Detected(
        launcher="Open MPI",
        job=variables[name],
        rank=whole_number(variables, OPEN_MPI[0]),
        size=size,
        local_rank=whole_number(variables, OPEN_MPI[2]),
        local_size=local_size,
        node_rank=0 if local_size == size else None,
        counts_nodes=local_size == size,
    )


def _mpich(variables: Variables) -> Detected:
    # It gives its job no name: the user has to.
    _require(variables, "MPICH", MPICH)
    size, local_size = whole_number(variables, "PMI_SIZE"), whole_number(variables, "MPI_LOCALNRANKS")
    return Detected(
        launcher="MPICH",
        job=f"{variables['MASTER_ADDR']} {variables['MASTER_PORT']}",
        rank=whole_number(variables, "PMI_RANK"),
        size=size,
        local_rank=whole_number(variables, "MPI_LOCALRANKID"),
        local_size=local_size,
        node_rank=0 if local_size == size else None,
        counts_nodes=local_size == size,
        master=(variables["MASTER_ADDR"], whole_number(variables, "MASTER_PORT")),
    )


def _in_slurm_step(variables: Variables) -> bool:
    """Return whether srun started this process as a task: no shell, be it of salloc, of sbatch or of `srun --pty`."""
    step = variables.get("SLURM_STEP_ID", "")
    return step.isdecimal() and int(step) < SLURM_STEPS_END and "SLURM_PTY_PORT" not in variables


def _slurm(variables: Variables) -> Detected:
    _require(variables, "Slurm", SLURM)
    size = whole_number(variables, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in variables else "SLURM_NTASKS")
    nodes = "SLURM_STEP_NUM_NODES" if "SLURM_STEP_NUM_NODES" in variables else "SLURM_NNODES"
    num_nodes = whole_number(variables, nodes, default=1)
    return Detected(
        launcher="Slurm",
        job=f"{variables['SLURM_JOB_ID']}.{variables['SLURM_STEP_ID']}",
        rank=whole_number(variables, "SLURM_PROCID"),
        size=size,
        local_rank=whole_number(variables, "SLURM_LOCALID"),
        local_size=size if num_nodes == 1 else None,
        node_rank=whole_number(variables, "SLURM_NODEID"),
        num_nodes=num_nodes,
        restart=whole_number(variables, "SLURM_RESTART_COUNT", default=0),
    )


def _torch(variables: Variables) -> Detected:
    _require(variables, "torch.distributed", TORCH)
    size = whole_number(variables, "WORLD_SIZE")
    local_size = whole_number(variables, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in variables else None
    on_one = is_loopback(variables["MASTER_ADDR"]) or local_size == size
    return Detected(
        launcher="torch.distributed",
        job=f"{variables['MASTER_ADDR']} {variables['MASTER_PORT']}",
        rank=whole_number(variables, "RANK"),
        size=size,
        local_rank=whole_number(variables, "LOCAL_RANK") if "LOCAL_RANK" in variables else None,
        local_size=local_size,
        node_rank=0 if on_one else None,
        counts_nodes=on_one,
        master=(variables["MASTER_ADDR"], whole_number(variables, "MASTER_PORT")),
    )


def _dmlc(variables: Variables) -> Detected:
    _require(variables, "DMLC", DMLC)
    match variables["DMLC_ROLE"]:
        case "worker" | "server" | "scheduler" as role:
            pass
        case other:
            raise UsageError(f"DMLC_ROLE is {other!r}, expected worker, server or scheduler")
    if whole_number(variables, "DMLC_NUM_SERVER") == 0:
        raise UsageError("DMLC_NUM_SERVER is 0, expected at least 1: the servers hold the parameters")
    name = "DMLC_WORKER_ID" if role == "worker" else "DMLC_SERVER_ID"
    on_one = is_loopback(variables["DMLC_PS_ROOT_URI"])
    return Detected(
        launcher="DMLC",
        job=f"{variables['DMLC_PS_ROOT_URI']} {variables['DMLC_PS_ROOT_PORT']}",
        rank=whole_number(variables, name) if name in variables else None,
        size=whole_number(variables, "DMLC_NUM_WORKER"),
        node_rank=0 if on_one else None,
        counts_nodes=on_one,
        master=(variables["DMLC_PS_ROOT_URI"], whole_number(variables, "DMLC_PS_ROOT_PORT")),
        role=role,
        num_servers=whole_number(variables, "DMLC_NUM_SERVER"),
    )


class _Task(msgspec.Struct, frozen=True):
    type: str
    index: int


class _TensorFlow(msgspec.Struct, frozen=True):
    cluster: dict[str, list[str]]
    task: _Task


def _tensorflow(text: str) -> Detected:
    try:
        told = msgspec.json.decode(text, type=_TensorFlow)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise UsageError(f"TF_CONFIG is not the description of a cluster and a task: {error}") from error
    kind, index = told.task.type, told.task.index
    members = {name: len(told.cluster.get(name, ())) for name in ("chief", "master", "worker", "ps")}
    if not 0 <= index < members.get(kind, 0):
        raise UsageError(
            f"TF_CONFIG: the task is {kind} {index}, of which the cluster has {members.get(kind, 0)}; a task is one of "
            f"{', '.join(name for name, count in members.items() if count)}"
        )
    num_chiefs = members["chief"] + members["master"]
    num_hosts = len({address.rpartition(":")[0] for addresses in told.cluster.values() for address in addresses})
    return Detected(
        launcher="TF_CONFIG",
        job=hashlib.sha256(msgspec.json.encode(told.cluster, order="sorted")).hexdigest()[:16],
        rank=index + num_chiefs if kind == "worker" else index,
        size=num_chiefs + members["worker"],
        node_rank=0 if num_hosts == 1 else None,
        num_nodes=num_hosts,
        role="server" if kind == "ps" else "worker",
        num_servers=members["ps"],
    )


def _check(found: Detected) -> None:
    """Raise UsageError for numbers that cannot all be true."""
    limit = found.num_servers if found.role == "server" else found.size
    if found.rank is not None and found.role != "scheduler" and found.rank >= limit:
        names = _names_of(found.launcher)
        raise UsageError(
            f"{found.launcher} says that this is rank {found.rank} of {limit} ({names}): ranks count from 0, so it "
            "must be less. Something else has set one of these variables"
        )
    local_size = found.local_size
    if local_size is not None and found.local_rank is not None and not found.local_rank < local_size <= found.size:
        raise UsageError(
            f"{found.launcher} says that this is local rank {found.local_rank} of {local_size} on this node, of "
            f"{found.size} in all ({_names_of(found.launcher)}): this contradicts itself"
        )


def _names_of(launcher: str) -> str:
    known = {
        "torchrun": TORCHRUN[:4],
        "Open MPI": OPEN_MPI,
        "MPICH": MPICH[:4],
        "Slurm": (*SLURM[2:], "SLURM_STEP_NUM_TASKS"),
        "torch.distributed": TORCH[:2],
        "DMLC": ("DMLC_WORKER_ID", "DMLC_SERVER_ID", *DMLC[1:3]),
        "TF_CONFIG": ("TF_CONFIG",),
    }
    return ", ".join(known[launcher])


def _require(variables: Variables, launcher: str, names: tuple[str, ...]) -> None:
    missing = [name for name in names if not variables.get(name)]
    if missing:
        raise UsageError(
            f"the environment is that of a job of {launcher}, but lacks {', '.join(missing)} (it takes "
            f"{', '.join(names)}). Set what is missing, or unset the others to run alone"
        )
