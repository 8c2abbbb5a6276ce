"""`paceline run`: a script as several workers and servers, on this machine or where an engine places them.

Light, as it is imported for every command: what it needs is imported when it runs.
"""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from cyclopts import App, Group, Parameter, Token

from paceline.errors import UsageError
from paceline.job.choices import Engine, ScaleName, TraceLevel, TransportName
from paceline.launch.crash_policy import CrashPolicy
from paceline.launch.joining.options import ListenOptions
from paceline.launch.recording import RecordOptions
from paceline.notices import tell
from paceline.observe.export.options import ExportOptions
from paceline.ray.options import RayOptions
from paceline.snapshots.options import SnapshotOptions

if TYPE_CHECKING:
    from cyclopts import ArgumentCollection

    from paceline.launch.plan import LocalRun

# Options by what they are about, in this order.
PROCESSES: Final = Group("Processes", sort_key=1)
TRAINING: Final = Group("Training", sort_key=2)
OUTPUT: Final = Group("What is shown and kept", sort_key=3)
CRASHES: Final = Group("When a process ends", sort_key=4)
SNAPSHOTS: Final = Group("Snapshots", sort_key=5)
MACHINES: Final = Group("Workers of other machines", sort_key=6)
RAY: Final = Group("Ray, with --engine ray", sort_key=7)


def run(
    script: Path,
    /,
    *args: Annotated[str, Parameter(allow_leading_hyphen=True)],
    config: Annotated[Path | None, Parameter(group=PROCESSES)] = None,
    workers: Annotated[str, Parameter(alias="-n", group=PROCESSES)] = "2",
    servers: Annotated[int, Parameter(alias="-m", group=PROCESSES)] = 1,
    data_servers: Annotated[int, Parameter(group=PROCESSES)] = 0,
    engine: Annotated[Engine, Parameter(group=PROCESSES)] = "local",
    ray: Annotated[RayOptions, Parameter(name="*", group=RAY)] = RayOptions(),  # noqa: B008 - it is frozen
    snapshots: Annotated[SnapshotOptions, Parameter(name="*", group=SNAPSHOTS)] = SnapshotOptions(),  # noqa: B008 - it is frozen
    export: Annotated[ExportOptions, Parameter(name="*", group=OUTPUT)] = ExportOptions(),  # noqa: B008 - it is frozen
    joining: Annotated[ListenOptions, Parameter(name="*", group=MACHINES)] = ListenOptions(),  # noqa: B008 - it is frozen
    consistency: Annotated[str | None, Parameter(group=TRAINING)] = None,
    strategy: Annotated[str | None, Parameter(group=TRAINING)] = None,
    transport: Annotated[TransportName, Parameter(group=PROCESSES)] = "shm",
    scale: Annotated[ScaleName | None, Parameter(group=TRAINING)] = None,
    divide_lr: Annotated[bool, Parameter(negative="", group=TRAINING)] = False,
    crash_policy: Annotated[CrashPolicy, Parameter(name="*", group=CRASHES)] = CrashPolicy(),  # noqa: B008 - it is frozen
    timeout: Annotated[float | None, Parameter(group=CRASHES)] = None,
    run_dir: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
    record: Annotated[RecordOptions, Parameter(name="*", group=OUTPUT)] = RecordOptions(),  # noqa: B008 - it is frozen
    shares: Annotated[str | None, Parameter(group=PROCESSES)] = None,
    server_threads: Annotated[int | None, Parameter(group=PROCESSES)] = None,
    pin: Annotated[bool, Parameter(negative="", group=PROCESSES)] = False,
    publish: Annotated[int, Parameter(group=TRAINING)] = 0,
    debug: Annotated[int | None, Parameter(group=OUTPUT)] = None,
    trace: Annotated[TraceLevel, Parameter(group=OUTPUT)] = "steps",
    quiet: Annotated[bool, Parameter(negative="", group=OUTPUT)] = False,
    progress: Annotated[bool, Parameter(group=OUTPUT)] = True,
    dashboard: Annotated[bool, Parameter(negative="", group=OUTPUT)] = False,
    traceback: Annotated[bool, Parameter(negative="", group=OUTPUT)] = False,
) -> int:
    """Run a script as several workers and servers, on this machine or where an engine places them.

    Options stand before the script; everything after it goes to the script untouched. `-m NAME` in place of the script
    runs a module by its name, as python does; `-m 2` says how many servers there are.

    Parameters
    ----------
    script
        The Python script that every worker runs, or -m and the name of a module.
    args
        Its arguments.
    config
        A file (.toml, .yaml, .json) with options by their names, and the script's first arguments as args; options
        on the command line take precedence.
    workers
        Number of worker processes. 2:8 begins with two, and `paceline scale` and `paceline join` change their number,
        up to eight.
    servers
        Number of server processes, which hold the parameters between them.
    data_servers
        Number of processes that read and prepare batches for paceline.feed; without any, workers do that themselves.
    engine
        What starts them: this command, on this machine, or Ray, on a cluster.
    ray
        What is asked of Ray.
    snapshots
        What is asked about snapshots.
    export
        Where what the script reports goes.
    joining
        Where workers of other machines join.
    consistency
        When reads wait for other workers: bsp, ssp:S, essp:S, asynchronous, backup:B or adaptive:L:S. For every table
        whose consistency the script does not set.
    strategy
        How workers share the work where the script says nothing: parameter-server, a consistency such as ssp:3,
        all-reduce, fsdp or fsdp:WORKERS, local-sgd:STEPS, diloco:STEPS or downpour:STEPS, and joined to it by +
        pipeline:STAGES and tensor:RANKS.
    transport
        How workers and servers talk: shared memory, TCP, or as threads of one process (memory).
    scale
        How the gradients of several workers become one: their sum, mean, or mean weighted by samples.
    divide_lr
        Divide learning rates by the number of workers where each push is an update of its own (ssp, essp, asynchronous,
        downpour), so that all of a clock step as far as their mean does under bsp and all-reduce.
    crash_policy
        What to do when a process crashes.
    timeout
        How many seconds a worker waits for others, in any call, before it gives up: 600 by default, or what
        PACELINE_TIMEOUT_S says, and at least three times the longest step so far.
    run_dir
        New or empty folder that keeps the run's traces. Without it the latest are kept, of the last 20 runs, in
        ~/.local/state/paceline/runs; PACELINE_KEEP_RUNS=0 keeps nothing.
    record
        What is kept for paceline replay.
    shares
        How much of every table each server holds, as proportions such as 2,1,1, or measured:RUN_DIR for the bytes per
        second of each in an earlier run. By default all hold the same.
    server_threads
        With how many threads each server updates; by default its share of all cores under bsp, else of those that
        workers leave free.
    pin
        Keep each worker on cores of its own.
    publish
        Worker 0 publishes the trained models every so many clocks, for paceline.subscribe; 0 for never.
    debug
        The rank of a worker that gets this terminal, for breakpoint() and pdb; the others wait for it.
    trace
        How much is recorded: every step, or every message too.
    quiet
        Show only what the script prints, and errors.
    progress
        Show live progress.
    dashboard
        Show the run on a page for a browser on this machine, and print its address; the page ends with the run.
    traceback
        Show whole tracebacks of errors, of workers and servers too, instead of one line that says what to do.
    """
    asked = run_of(script, args, config, workers)(
        num_servers=servers,
        num_data_servers=data_servers,
        transport=transport,
        consistency=check_policy(consistency, strategy, workers),
        strategy=strategy,
        scale=scale,
        divide_lr=divide_lr,
        trace=trace,
        run_dir=run_dir,
        record=record,
        snapshots=snapshots,
        export=export,
        joining=joining,
        shares=parts_of(shares, servers, quiet=quiet),
        timeout_s=timeout,
        server_threads=server_threads,
        pin=pin,
        publish_every=publish,
        debug=debug,
        crash_policy=crash_policy,
        progress=progress and not quiet,
        quiet=quiet,
        dashboard=dashboard,
        traceback=traceback,
    )
    return start(engine, ray, asked)


def parts_of(shares: str | None, num_servers: int, *, quiet: bool) -> tuple[float, ...]:
    """Return how much of every table each server holds, and tell what was made of the option."""
    from paceline.launch.shares import read_shares

    parts, why = read_shares(shares, num_servers)
    if why and not quiet:
        tell(why)
    return parts


def start(engine: Engine, ray: RayOptions, asked: "LocalRun") -> int:
    """Have an engine run a job to its end, and return its exit code."""
    if engine == "ray":
        if asked.record != RecordOptions():
            raise UsageError("--record is for --engine local: leave it out on Ray")
        if asked.export.is_wanted:
            raise UsageError("--log and --metrics are for --engine local: leave them out on Ray")
        if asked.joining != ListenOptions():
            raise UsageError("--listen and --keys are for --engine local: leave them out on Ray")
        from paceline.ray.driver import run_on_ray

        return run_on_ray(asked, ray)
    from paceline.api.programs import PROGRAMS
    from paceline.launch.local import run_local

    if ray != RayOptions():
        raise UsageError(f"{ray.chosen()} is for --engine ray, and the engine is {engine}")
    return run_local(asked, PROGRAMS)


def take_config(_app: App, commands: tuple[str, ...], arguments: "ArgumentCollection") -> None:
    """Let `run` take options from the file behind --config, except those that the command line names."""
    if commands != ("run",) or not (named := arguments.match("--config")[0].tokens):
        return
    from paceline.launch.config import as_text, read_config

    path = named[0].value
    for name, value in read_config(Path(path)).options.items():
        if name == "config":
            raise UsageError(f"{path}: a file names no other one: leave out 'config'")
        try:
            argument, _, _ = arguments.match(f"--{name}")
        except ValueError:
            raise UsageError(
                f"{path}: '{name}' is not an option of paceline run; arguments of the script go to args"
            ) from None
        if not argument.tokens:
            argument.append(Token(keyword=f"--{name}", value=as_text(value), source=path))


def config_args(config: Path | None) -> tuple[str, ...]:
    """Return the arguments of the script that a file has."""
    from paceline.launch.config import read_config

    return () if config is None else read_config(config).args


def run_of(script: Path, args: tuple[str, ...], config: Path | None, workers: str) -> "partial[LocalRun]":
    """Return a run of a program by so many workers that lacks its other options."""
    from paceline.launch.plan import LocalRun, read_workers

    (path, module, args), count = read_program(script, args), read_workers(workers)
    run = partial(LocalRun, script=path, module=module, args=(*config_args(config), *args))
    return partial(run, num_workers=count.places, num_at_start=count.at_start)


def read_program(script: Path, args: tuple[str, ...]) -> tuple[Path, str | None, tuple[str, ...]]:
    """Return the file to run, the module that it is where `-m` names one, and the arguments."""
    from paceline.launch.script import OPTION, search_path, source_of

    if str(script) != OPTION:
        return script, None, args
    if not args:
        raise UsageError("-m needs the name of a module: paceline run -m package.module")
    return source_of(args[0], search_path()), args[0], args[1:]


def check_policy(consistency: str | None, strategy: str | None, workers: str) -> str | None:
    """Return the consistency that was given, or that of a strategy, if it names one.

    Raises UsageError when one of the texts names none, or a strategy that so many workers cannot share.
    """
    from paceline.core.consistency import Consistency
    from paceline.job.strategy import Distribution
    from paceline.launch.plan import read_workers

    if consistency is not None:
        Consistency.parse(consistency)
    if strategy is None:
        return consistency
    distribution = Distribution.parse(strategy)
    distribution.num_replicas(read_workers(workers).places)
    return consistency or distribution.consistency
