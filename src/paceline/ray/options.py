"""Options of `paceline run --engine ray`. Light, as the command line imports it."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypedDict

from cyclopts import Parameter

from paceline.errors import UsageError
from paceline.job.environment import asked_servers
from paceline.job.spec import MAX_LAG

if TYPE_CHECKING:
    from paceline.launch.plan import LocalRun

Spread = Literal["pack", "spread", "strict-pack", "strict-spread"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    """What is asked of Ray, with --engine ray.

    Parameters
    ----------
    address
        The cluster: auto, or HOST:PORT. Default: a new one on this machine, for this run.
    place_servers
        How servers and data servers are placed: spread over many nodes or packed onto few, as far as possible; strict
        placement waits until it is possible.
    place_workers
        How workers are placed.
    worker_cpus
        CPUs of each worker.
    worker_gpus
        GPUs of each worker; it sees no others.
    worker_resources
        Amount of a named resource of the cluster for each worker: NAME=AMOUNT.
    server_cpus
        CPUs of each server, replica and data server.
    replicas
        1 for a replica of each server, on another node where there are several: it serves when the server is lost.
        0: as PACELINE_SERVERS says, else none.
    lag
        Clocks by which answers to workers may be ahead of replicas. 0: as PACELINE_SERVERS says, else none.
    working_dir
        Folder that is copied to every node, with the script in it. Default: that of the script, with --address.
    env
        Environment variable of workers and servers: NAME=VALUE.
    pip
        Package that Ray installs for workers and servers.
    dashboard_host
        Address at which the dashboard of a new cluster listens. Default: no dashboard.
    start_timeout
        Seconds to wait for room on the cluster, and as many again for servers to listen.
    """

    address: str | None = None
    place_servers: Spread = "spread"
    place_workers: Spread = "pack"
    worker_cpus: float = 1.0
    worker_gpus: float = 0.0
    worker_resources: Annotated[tuple[str, ...], Parameter(name="--worker-resource", negative="")] = ()
    server_cpus: float = 1.0
    replicas: Annotated[int, Parameter(show_default=False)] = 0
    lag: Annotated[int, Parameter(show_default=False)] = 0
    working_dir: Path | None = None
    env: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    pip: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    dashboard_host: str | None = None
    start_timeout: float = 60.0

    def validate(self, run: "LocalRun") -> None:
        """Raise UsageError for what cannot be."""
        for name in ("worker_cpus", "worker_gpus", "server_cpus", "replicas", "lag", "start_timeout"):
            _check_number(name, getattr(self, name))
        if run.transport == "memory":
            raise UsageError("--transport memory is one process, and Ray starts many; choose shm or tcp")
        if run.module is not None:
            raise UsageError(
                f"-m {run.module} is for processes of this machine, and Ray brings scripts to its nodes as files: name "
                "a script that imports it"
            )
        self._validate_replicas()
        if run.debug is not None:
            raise UsageError("--debug gives a worker this terminal, and under Ray workers are elsewhere: leave it out")
        if run.pin:
            raise UsageError("--pin is for one machine of your own; under Ray give every worker --worker-cpus")
        if self.address is not None and "://" in self.address:
            raise UsageError(
                f"--address is {self.address!r}, expected auto or HOST:PORT: the launcher runs on a node of the "
                "cluster; from elsewhere send it there, with `ray job submit` for example"
            )
        for what, amount in (("worker-cpus", self.worker_cpus), ("server-cpus", self.server_cpus)):
            if not 0 < amount < math.inf:
                raise UsageError(f"--{what} must be more than 0, got {amount:g}: Ray places by what is taken")
        if not 0 <= self.worker_gpus < math.inf or not self.start_timeout > 0:
            raise UsageError(
                "--worker-gpus must be 0 or more, and --start-timeout more than 0 s; "
                f"got {self.worker_gpus:g} and {self.start_timeout:g}"
            )
        self.variables()
        self.worker_needs()
        self.script_there(run.script)

    def _validate_replicas(self) -> None:
        """Raise UsageError for numbers that make no replicas."""
        if self.replicas not in (0, 1):
            raise UsageError(f"--replicas is {self.replicas:g}, expected 1 for a replica of each server, or 0")
        if not 0 <= self.lag <= MAX_LAG or self.lag != int(self.lag):
            raise UsageError(f"--lag is {self.lag:g}, expected a number of clocks from 0 to {MAX_LAG}")
        if self.lag and not self.replicas:
            raise UsageError(f"--lag is {self.lag}: replicas may lag, and there are none. Add --replicas 1")
        if self.replicas and self.place_servers != "spread":
            raise UsageError(
                f"--place-servers is {self.place_servers}, and with --replicas each server is placed together with its "
                "replica, on two nodes where there are several: leave it out"
            )

    def with_environment(self) -> "RayOptions":
        """Return the options with the replicas that PACELINE_SERVERS asks for, if they ask for none themselves.

        Raises UsageError for text that says nothing of servers.
        """
        # Deferred: this is imported for every command.
        from paceline.launch.rendezvous.roles import Servers

        asked = asked_servers()
        if asked is None or self.replicas or self.lag:
            return self
        servers = Servers.parse(asked)
        return replace(self, replicas=int(servers.has_replicas), lag=servers.replica_lag)

    def chosen(self) -> str:
        """Return the name of an option that is not as it would be without being given."""
        changed = [field.name for field in fields(self) if getattr(self, field.name) != field.default]
        return "--" + changed[0].replace("_", "-").removesuffix("s" if changed[0] == "worker_resources" else "")

    def variables(self) -> dict[str, str]:
        """Return the variables of --env; raises UsageError."""
        return dict(_split(text, "--env", "NAME=VALUE") for text in self.env)

    def worker_needs(self) -> dict[str, float]:
        """Return what a worker takes of its node; raises UsageError."""
        gpus = {"GPU": self.worker_gpus} if self.worker_gpus else {}
        return {"CPU": self.worker_cpus, **gpus, **dict(map(_read_amount, self.worker_resources))}

    def folder(self, script: Path) -> Path | None:
        """Return the folder that every node gets a copy of, or None when the script is used where it is."""
        if self.working_dir is not None:
            return self.working_dir.resolve()
        return script.resolve().parent if self.address is not None else None

    def script_there(self, script: Path) -> Path:
        """Return where processes find the script: from their working directory, or from anywhere.

        Raises UsageError when it is not in the folder that they get.
        """
        folder = self.folder(script)
        if folder is None:
            return script.absolute()
        if not script.resolve().is_relative_to(folder):
            raise UsageError(f"--working-dir {folder} must be a folder with the script {script} in it")
        return script.resolve().relative_to(folder)


class WorkerNeeds(TypedDict):
    """What a worker takes of its node."""

    worker_cpus: float
    worker_gpus: float
    worker_resources: tuple[str, ...]


class Brought(TypedDict):
    """What comes to the nodes with a job."""

    working_dir: Path | None
    env: tuple[str, ...]
    pip: tuple[str, ...]


def needs_of_worker(cpus: float, gpus: float, resources: object) -> WorkerNeeds:
    """Return options from arguments in Python; raises UsageError.

    >>> needs_of_worker(2.0, 0.0, {"TPU": 1})["worker_resources"]
    ('TPU=1',)
    """
    named = as_pairs("worker_resources", resources, "an amount")
    return WorkerNeeds(worker_cpus=cpus, worker_gpus=gpus, worker_resources=named)


def brought_along(working_dir: Path | str | None, env: object, pip: object) -> Brought:
    """Return options from arguments in Python; raises UsageError.

    >>> brought_along(None, {"COLOUR": "green"}, ["numpy"])
    {'working_dir': None, 'env': ('COLOUR=green',), 'pip': ('numpy',)}
    """
    folder = None if working_dir is None else Path(working_dir)
    return Brought(working_dir=folder, env=as_pairs("env", env, "a text"), pip=as_words("pip", pip))


def as_words(name: str, given: object) -> tuple[str, ...]:
    """Return the words of an argument; raises UsageError for what is not several texts.

    >>> as_words("args", ["--lr", "0.1"])
    ('--lr', '0.1')
    """
    words = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str | bytes) else (None,)
    texts = tuple(word for word in words if isinstance(word, str))
    if len(texts) < len(words):
        raise UsageError(f"paceline.ray.run: {name} is {given!r}, expected a list of texts")
    return texts


def as_pairs(name: str, given: object, expected: str) -> tuple[str, ...]:
    """Return NAME=VALUE for each of a mapping, none for None; raises UsageError for anything else.

    >>> as_pairs("worker_resources", {"TPU": 1}, "an amount")
    ('TPU=1',)
    """
    if given is None:
        return ()
    if not isinstance(given, Mapping):
        raise UsageError(f"paceline.ray.run: {name} is {given!r}, expected a dict with {expected} for each name")
    return tuple(f"{key}={value}" for key, value in given.items())


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"paceline.ray.run: {name} is {value!r}, expected a number")


def _read_amount(text: str) -> tuple[str, float]:
    name, amount = _split(text, "--worker-resource", "NAME=AMOUNT")
    try:
        found = float(amount)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise UsageError(f"--worker-resource is {text!r}, expected NAME=AMOUNT with an amount of more than 0")
    return name, found


def _split(text: str, option: str, expected: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not (name and sign):
        raise UsageError(f"{option} is {text!r}, expected {expected}")
    return name, value
