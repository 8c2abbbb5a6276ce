"""Runs a script as a job of actors on a Ray cluster, which places and starts them.

>>> import paceline
>>> paceline.ray.run("train.py", workers=4, servers=2, address="auto")  # doctest: +SKIP
0

Ray comes with `pip install 'paceline[ray]'`, and is imported when a job begins.

Other folders use `driver`, `options`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.job.choices import OnCrash, OnError, ScaleName, TraceLevel
    from paceline.ray.options import Spread

__all__ = ["run"]


def run(
    script: Path | str,
    args: Sequence[str] = (),
    *,
    workers: int = 2,
    servers: int = 1,
    data_servers: int = 0,
    address: str | None = None,
    consistency: str | None = None,
    strategy: str | None = None,
    scale: ScaleName | None = None,
    on_crash: OnCrash = "continue",
    on_error: OnError = "stop",
    max_restarts: int = 3,
    run_dir: Path | str | None = None,
    trace: TraceLevel = "steps",
    quiet: bool = False,
    place_servers: Spread = "spread",
    place_workers: Spread = "pack",
    worker_cpus: float = 1.0,
    worker_gpus: float = 0.0,
    worker_resources: Mapping[str, float] | None = None,
    server_cpus: float = 1.0,
    replicas: int = 0,
    lag: int = 0,
    working_dir: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    pip: Sequence[str] = (),
    start_timeout_s: float = 60.0,
) -> int:
    """Run a script as a job on a Ray cluster, as `paceline run --engine ray` does, and return its exit code.

    Blocks until the job has ended; call it from the main thread, because it answers Ctrl-C and SIGTERM meanwhile. The
    arguments are the options of `paceline run`; where it writes snapshots and what it goes on from is set by the
    variables PACELINE_SNAPSHOTS, PACELINE_SNAPSHOT_EVERY and PACELINE_RESUME of this process.

    Args:
        script: what every worker runs.
        args: its arguments.
        workers: number of worker processes.
        servers: number of server processes.
        data_servers: number of processes that read and prepare batches for `paceline.feed`.
        address: the cluster: "auto" or HOST:PORT. By default the one that this process has joined with `ray.init`, or
            else one that is started on this machine and ends with the job.
        consistency: as in `paceline.ssp(3)`, by its name: "ssp:3".
        strategy: how workers share the work where the script says nothing.
        scale: how the gradients of several workers become one.
        on_crash: what to do when a worker or its actor is killed.
        on_error: what to do when a worker's script fails.
        max_restarts: how often one worker is started again.
        run_dir: new or empty folder that keeps the run's traces, on this machine.
        trace: how much is recorded.
        quiet: show only what the script prints, and errors.
        place_servers: how servers and data servers are placed.
        place_workers: how workers are placed.
        worker_cpus: CPUs of each worker.
        worker_gpus: GPUs of each worker.
        worker_resources: amounts of named resources of the cluster for each worker.
        server_cpus: CPUs of each server, replica and data server.
        replicas: 1 for a replica of each server, on another node where there are several, which serves when the server
            is lost. By default what PACELINE_SERVERS says, else none.
        lag: clocks by which answers to workers may be ahead of replicas.
        working_dir: folder that is copied to every node, with the script in it.
        env: environment variables of workers and servers.
        pip: packages that Ray installs for workers and servers.
        start_timeout_s: how long to wait for room on the cluster, and then for servers to listen.

    Raises:
        UsageError: settings that make no run, or Ray is not installed.
        PeerError: there is no such cluster, or it has no room in time.
    """
    from paceline.launch import crash_policy, plan
    from paceline.ray import driver, options

    asked = plan.LocalRun(
        script=Path(script),
        args=options.as_words("args", args),
        num_workers=workers,
        num_servers=servers,
        num_data_servers=data_servers,
        consistency=consistency,
        scale=scale,
        strategy=strategy,
        trace=trace,
        run_dir=None if run_dir is None else Path(run_dir),
        crash_policy=crash_policy.CrashPolicy(on_crash, on_error, max_restarts),
        progress=not quiet,
        quiet=quiet,
    )
    placed = options.RayOptions(
        address=address,
        place_servers=place_servers,
        place_workers=place_workers,
        **options.needs_of_worker(worker_cpus, worker_gpus, worker_resources),
        server_cpus=server_cpus,
        replicas=replicas,
        lag=lag,
        **options.brought_along(working_dir, env, pip),
        start_timeout=start_timeout_s,
    )
    return driver.run_on_ray(asked, placed)
