"""Starts a job on a Ray cluster and watches over it: what `paceline run --engine ray` does."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from paceline.job.spec import write_token
from paceline.launch.console import Console
from paceline.launch.exits import Exits
from paceline.launch.local import TRACE_NAME, guarded_folder, open_board, open_copy, require_startable
from paceline.launch.output import unblocked_output
from paceline.launch.plan import DEFAULT_PROGRAMS, LocalRun, plan_launches
from paceline.launch.signals import Signals
from paceline.launch.supervise import SupervisionConfig, Supervisor
from paceline.ray.backend import RayBackend
from paceline.ray.engine import joined, prepare
from paceline.ray.options import RayOptions


def run_on_ray(run: LocalRun, options: RayOptions) -> int:
    """Run a script as a job of several processes on a Ray cluster.

    Blocks until the job has ended, and returns its exit code as `run_local` does. Raises UsageError for a run that
    cannot start, and PeerError when there is no cluster, or no room on it in time. Call it from the main thread: it
    answers signals while it runs.
    """
    run.validate()
    options.validate(run)
    require_startable(run.script, "paceline.ray.run")
    ray = prepare(options)
    with guarded_folder(run.run_dir) as (run_dir, _):
        return _supervise(ray, run, options, run_dir)


def _supervise(ray: ModuleType, run: LocalRun, options: RayOptions, run_dir: Path) -> int:
    write_token(run_dir)
    trace_folder = run_dir / TRACE_NAME
    trace_folder.mkdir()
    config = SupervisionConfig(
        policy=run.policy, start_timeout_s=options.start_timeout, grace_s=run.grace_s, run_dir=run_dir
    )
    with open_copy(run.copy_to) as copy:
        console = Console(copy)
        with joined(ray, run, options, console) as cluster, Signals() as signals, unblocked_output() as outlets:
            board = open_board(trace_folder, run.num_workers) if run.progress else None
            backend = RayBackend(run, options, run_dir, cluster, console, signals.wakeup_fd, outlets)
            supervisor = Supervisor(config, backend, backend, console, signals, board, Exits(console, board, run_dir))
            return supervisor.run(plan_launches(run, DEFAULT_PROGRAMS, run_dir, {}))
