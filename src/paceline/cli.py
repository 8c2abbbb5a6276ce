"""The command line: `paceline run`, `tune`, `serve`, `launch`, `keys`, `compare`, `demo`, `simulate` and `plan`.

Thin and light: what a command needs is imported when it runs, so that `paceline --help` answers at once.
"""

import inspect
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from cyclopts import App, CycloptsError, Parameter, Token

from paceline import __version__
from paceline.errors import PacelineError, UsageError
from paceline.launch.choices import Engine, OnCrash, OnError, ScaleName, TraceLevel, TransportName
from paceline.launch.limits import explain, is_shortage
from paceline.ray.options import RayOptions

if TYPE_CHECKING:
    from cyclopts import ArgumentCollection

    from paceline.launch.plan import LocalRun

TRACEBACK_FLAG: Final = "--traceback"
END_OF_OPTIONS: Final = "--"
# At which place the script stands that takes all the rest: a search has its file before it.
SCRIPT_PLACES: Final = {"run": 1, "launch": 1, "tune": 2}
EXIT_FAILURE: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130


app = App(
    name="paceline",
    help="The parameter server for PyTorch. Any command takes --traceback, to show where an error came from.",
    version=__version__,
    help_format="markdown",  # which fills lines anew
    print_error=False,
    exit_on_error=False,
    result_action="return_int_as_exit_code_else_zero",
)


@app.command
def run(
    script: Path,
    /,
    *args: Annotated[str, Parameter(allow_leading_hyphen=True)],
    config: Path | None = None,
    workers: Annotated[int, Parameter(alias="-n")] = 2,
    servers: Annotated[int, Parameter(alias="-m")] = 1,
    data_servers: int = 0,
    engine: Engine = "local",
    ray: Annotated[RayOptions, Parameter(name="*")] = RayOptions(),  # noqa: B008 - it is frozen
    consistency: str | None = None,
    strategy: str | None = None,
    transport: TransportName = "shm",
    scale: ScaleName | None = None,
    on_crash: OnCrash = "continue",
    on_error: OnError = "stop",
    max_restarts: int = 3,
    timeout: float | None = None,
    grace_s: float = 5.0,
    run_dir: Path | None = None,
    shares: str | None = None,
    server_threads: int | None = None,
    pin: Annotated[bool, Parameter(negative="")] = False,
    debug: int | None = None,
    trace: TraceLevel = "steps",
    quiet: Annotated[bool, Parameter(negative="")] = False,
    progress: bool = True,
    traceback: Annotated[bool, Parameter(negative="")] = False,
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
        A file (.toml, .yaml, .json) with options by their names, and the script's first arguments as args; what is
        said here wins.
    workers
        Number of worker processes.
    servers
        Number of server processes, which hold the parameters between them.
    data_servers
        Number of processes that read and prepare batches for paceline.feed; without any, workers do that themselves.
    engine
        Who starts them: we do, on this machine, or Ray does, on a cluster.
    ray
        What is asked of Ray.
    consistency
        bsp, ssp:S, essp:S, asynchronous or backup:B, for every table whose script names none.
    strategy
        How workers share the work where the script says nothing: parameter-server, a consistency such as ssp:3,
        all-reduce, fsdp, local-sgd:STEPS, diloco:STEPS or downpour:STEPS, and joined to it by + pipeline:STAGES and
        tensor:RANKS.
    transport
        How workers and servers talk: shared memory, TCP, or as threads of one process (memory).
    scale
        How the gradients of several workers become one: their sum, mean, or mean weighted by samples.
    on_crash
        What to do when a worker is killed by a signal; a run that has gone on without one ends with exit code 75.
    on_error
        What to do when a worker's script fails.
    max_restarts
        How often one worker is started again under --on-crash restart, after pauses that grow from 0.5 s to 30 s.
    timeout
        How many seconds a worker waits for others, in any call, before it gives up: 600 by default, or what
        PACELINE_TIMEOUT_S says, and at least three times the longest step so far.
    grace_s
        How many seconds workers have to finish their step and leave once the run is told to end.
    run_dir
        New or empty folder that keeps the run's traces; without it nothing is kept.
    shares
        How much of every table each server holds, as proportions such as 2,1,1; by default all the same. Or
        measured:RUN_DIR, by the bytes per second that each managed in a former run.
    server_threads
        With how many threads each server updates; by default all cores under bsp, else those that workers leave free.
    pin
        Keep each worker on cores of its own.
    debug
        The number of a worker that gets this terminal, for breakpoint() and pdb; the others wait for it.
    trace
        How much is recorded: every step, or every message too.
    quiet
        Show only what the script prints, and errors.
    progress
        Show live progress.
    traceback
        Show the whole traceback of errors, of workers and servers too, where otherwise one line says what to do.
    """
    from paceline.launch.plan import LocalRun
    from paceline.launch.policy import Policy

    check_consistency(consistency)
    path, module, args = read_program(script, args)
    asked = LocalRun(
        script=path,
        module=module,
        args=(*config_args(config), *args),
        num_workers=workers,
        num_servers=servers,
        num_data_servers=data_servers,
        transport=transport,
        consistency=consistency or check_strategy(strategy, workers),
        strategy=strategy,
        scale=scale,
        trace=trace,
        run_dir=run_dir,
        shares=parts_of(shares, servers, quiet=quiet),
        timeout_s=timeout,
        grace_s=grace_s,
        server_threads=server_threads,
        pin=pin,
        debug=debug,
        policy=Policy(on_crash=on_crash, on_error=on_error, max_restarts=max_restarts),
        progress=progress and not quiet,
        quiet=quiet,
        traceback=traceback,
    )
    return start(engine, ray, asked)


def parts_of(shares: str | None, num_servers: int, *, quiet: bool) -> tuple[float, ...]:
    """Return how much of every table each server holds, and tell what was made of the option."""
    from paceline.launch.shares import read_shares

    parts, why = read_shares(shares, num_servers)
    if why and not quiet:
        print(f"paceline: {why}", file=sys.stderr)
    return parts


def start(engine: Engine, ray: RayOptions, asked: "LocalRun") -> int:
    """Have an engine run a job to its end, and return its exit code."""
    if engine == "ray":
        from paceline.ray.driver import run_on_ray

        return run_on_ray(asked, ray)
    from paceline.launch.local import run_local

    if ray != RayOptions():
        raise UsageError(f"{ray.chosen()} is for --engine ray, and the engine is {engine}")
    return run_local(asked)


app.command("paceline.tuning.command:tune", name="tune", help="Search over the hyperparameters of a script.")
app.command("paceline.launch.emit.command:launch", name="launch", help="Write what Slurm or Kubernetes takes.")
app.command("paceline.compare.command:compare", name="compare", help="Run a script under several strategies.")
app.command("paceline.launch.keys.command:app", name="keys", help="Make and revoke keys for several machines.")
app.command("paceline.demo.command:demo", name="demo", help="Train on handwritten digits and write a report.")
app.command("paceline.simulate.command:simulate", name="simulate", help="Rehearse a policy on virtual time.")
app.command("paceline.serve.command:serve", name="serve", help="Serve jobs that come and go, and keep their state.")
app.command("paceline.planning.command:plan", name="plan", help="Say what fits where, and how to distribute.")


def take_config(_app: App, commands: tuple[str, ...], arguments: "ArgumentCollection") -> None:
    """Let `run` take options from the file behind --config, but for those that the command line names."""
    if commands != ("run",) or not (named := arguments.match("--config")[0].tokens):
        return
    from paceline.launch.config import as_text, read_config

    path = named[0].value
    for name, value in read_config(Path(path)).options.items():
        try:
            argument, _, _ = arguments.match(f"--{name}")
        except ValueError:
            raise UsageError(
                f"{path}: '{name}' is no option of paceline run; arguments of the script go to args"
            ) from None
        if not argument.tokens:
            argument.append(Token(keyword=f"--{name}", value=as_text(value), source=path))


app.config = (take_config,)


def config_args(config: Path | None) -> tuple[str, ...]:
    """Return the arguments of the script that a file has."""
    from paceline.launch.config import read_config

    return () if config is None else read_config(config).args


def read_program(script: Path, args: tuple[str, ...]) -> tuple[Path, str | None, tuple[str, ...]]:
    """Return the file to run, the module that it is where `-m` names one, and the arguments."""
    from paceline.launch.module import OPTION, search_path, source_of

    if str(script) != OPTION:
        return script, None, args
    if not args:
        raise UsageError("-m needs the name of a module: paceline run -m package.module")
    return source_of(args[0], search_path()), args[0], args[1:]


def check_consistency(text: str | None) -> None:
    """Raise UsageError when the text names no consistency."""
    from paceline.core.consistency import Consistency

    if text is not None:
        Consistency.parse(text)


def check_strategy(text: str | None, num_workers: int) -> str | None:
    """Return the consistency that a strategy names, if it does.

    Raises UsageError when the text names no strategy, or one that so many workers cannot share.
    """
    from paceline.core.strategies import Distribution

    if text is None:
        return None
    distribution = Distribution.parse(text)
    distribution.num_replicas(num_workers)
    return distribution.consistency


def main() -> None:
    """Answer the command line and exit: 0, 2 for the caller's mistake, 1 for another failure, or the job's code."""
    sys.exit(answer(sys.argv[1:]))


def answer(tokens: Sequence[str]) -> int:
    """Run one command and return its exit code; errors are told on stderr in one line."""
    options, script = split_at_script(tokens)
    wants_traceback = TRACEBACK_FLAG in options
    if options[:1] != ["run"]:  # `run` hands it on to its workers
        options = [token for token in options if token != TRACEBACK_FLAG]
    try:
        require_working_folder()
        return app([*options, END_OF_OPTIONS, *script] if script else options)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except (PacelineError, CycloptsError) as error:
        if wants_traceback:
            traceback.print_exception(error)
        print(f"paceline: {error}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, UsageError | CycloptsError) else EXIT_FAILURE
    except (OSError, MemoryError, RuntimeError) as error:
        if wants_traceback or not is_shortage(error):
            raise
        print(f"paceline: {explain(error)}", file=sys.stderr)
        return EXIT_FAILURE


def require_working_folder() -> None:
    """Raise UsageError where the folder that this was started in is gone: torch and scripts cannot do without one."""
    try:
        os.getcwd()
    except OSError as error:
        raise UsageError(f"the working folder cannot be used: {error.strerror}; cd to one that is there") from error


def split_at_script(tokens: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into our own part and, for commands that take one, the script with all that follows it.

    >>> split_at_script(["run", "-n", "4", "--quiet", "train.py", "-n", "9"])
    (['run', '-n', '4', '--quiet'], ['train.py', '-n', '9'])
    >>> split_at_script(["run", "-m", "2", "-m", "package.train", "-n", "9"])
    (['run', '-m', '2'], ['-m', 'package.train', '-n', '9'])
    """
    flags = switches()
    position, before = 1, SCRIPT_PLACES.get(tokens[0], 0) if tokens else 0
    while before and position < len(tokens):
        token = tokens[position]
        if token == END_OF_OPTIONS:
            return list(tokens[:position]), list(tokens[position + 1 :])
        if not token.startswith("-"):
            before -= 1
            if not before:
                return list(tokens[:position]), list(tokens[position:])
        elif names_module(tokens, position):
            return list(tokens[:position]), list(tokens[position:])
        position += 1 if token in flags or "=" in token or not token.startswith("-") else 2
    return list(tokens), []


def names_module(tokens: Sequence[str], position: int) -> bool:
    """Tell whether a module stands here in place of a script: `-m NAME`, where `-m 2` is a number of servers."""
    following = tokens[position + 1 : position + 2]
    takes_module = SCRIPT_PLACES.get(tokens[0]) == 1
    return takes_module and tokens[position] == "-m" and bool(following) and following[0][:1].isidentifier()


def switches() -> frozenset[str]:
    """Return the options before a script that take no value."""
    parameters = inspect.signature(run).parameters.values()
    names = [parameter.name for parameter in parameters if isinstance(parameter.default, bool)]
    return frozenset({"--help", "-h", TRACEBACK_FLAG, *(f"{no}{name}" for name in names for no in ("--", "--no-"))})
