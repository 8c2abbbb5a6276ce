"""The command line: `paceline run`, `top`, `scale`, `snapshot`, `tune`, `serve`, and what stands beside them.

A command's imports are deferred until it runs, so that `paceline --help` is fast.
"""

import inspect
import os
import re
import sys
import traceback
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Final, get_args

from cyclopts import App, ArgumentCollection, CycloptsError, Group, Parameter

from paceline import __version__
from paceline.errors import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_USAGE, PacelineError, UsageError
from paceline.launch.limits import explain, is_shortage
from paceline.launch.output import end_output, occupy_closed_streams, show_any_text
from paceline.notices import for_terminal
from paceline.tools.join import join
from paceline.tools.run import run, take_config

TRACEBACK_FLAG: Final = "--traceback"
END_OF_OPTIONS: Final = "--"
# Position of the script, which takes all arguments behind it: `tune` has its search file before it, `join` an address.
SCRIPT_PLACES: Final = {"run": 1, "launch": 1, "tune": 2, "join": 2}
MOST_DIGITS: Final = 18  # of a whole number, which then fits 64 bits wherever it goes
ENDLESS_NUMBER: Final = re.compile(r"\d{1000}")  # in a text, as `ssp:3` is one; Python reads none of 4300 digits
SCRIPT_ARGUMENTS: Final = "ARGS"
HELP_FLAGS: Final = frozenset({"--help", "-h"})

# Commands by what they are for, in this order; the command line's own options come last.
RUN: Final = Group("Run a job", sort_key=1)
LOOK: Final = Group("See what a run does", sort_key=2)
CHOOSE: Final = Group("Choose how to run", sort_key=3)
KEEP: Final = Group("Keep and serve", sort_key=4)
OPTIONS: Final = Group("Options", sort_key=5)


def shown_default(value: object) -> object | None:
    """Return a default as help shows it, None for one that says nothing: a flag that is off, or an empty text or list.

    >>> shown_default(2), shown_default(False), shown_default(()), shown_default(("bsp", "ssp:3"))
    (2, None, None, 'bsp,ssp:3')
    """
    if value is False or value in ("", ()):
        return None
    return ",".join(map(str, value)) if isinstance(value, tuple) else value


app = App(
    name="paceline",
    help="The parameter server for PyTorch. Any command takes --traceback, to show where an error came from.",
    version=__version__,
    help_format="markdown",  # which fills lines anew
    print_error=False,
    exit_on_error=False,
    result_action="return_int_as_exit_code_else_zero",
    default_parameter=Parameter(show_default=shown_default),
)


def add_command(group: Group, name: str, path: str, text: str) -> None:
    """Add a command that is imported when it is called; `text` says in a line what it does."""
    app.command(path, name=name, help=text, group=group)


app.command(run, group=RUN, sort_key=0)  # the first to read about
app.command(join, group=RUN)
add_command(RUN, "scale", "paceline.tools.scale:scale", "Change the number of workers of a running job.")
add_command(
    RUN, "spare", "paceline.launch.rendezvous.spare:spare", "Offer this machine to the servers of a running job."
)
add_command(
    RUN,
    "launch",
    "paceline.launch.manifests.command:launch",
    "Write a batch script for Slurm, or a RayJob for Kubernetes.",
)
add_command(RUN, "demo", "paceline.tools.demo.command:demo", "Train on handwritten digits and write a report.")
add_command(LOOK, "top", "paceline.tools.top:top", "Show what a job does, what holds it up and why.")
add_command(LOOK, "dashboard", "paceline.tools.dashboard:dashboard", "Show runs on a page in a browser.")
add_command(LOOK, "report", "paceline.tools.afterwards:report", "Draw what runs did, or tell how one ended.")
add_command(LOOK, "trace", "paceline.tools.afterwards:trace", "Write the timeline of a run for Perfetto.")
add_command(LOOK, "export", "paceline.tools.export:export", "Send what a run reports to trackers and Prometheus.")
add_command(LOOK, "replay", "paceline.tools.replay:replay", "Repeat from a record what servers did, to the bit.")
add_command(
    CHOOSE,
    "plan",
    "paceline.tools.plan.command:plan",
    "Estimate memory and time of strategies for a model, and recommend one.",
)
add_command(CHOOSE, "simulate", "paceline.simulate.command:simulate", "Try consistency policies on virtual time.")
add_command(
    CHOOSE, "compare", "paceline.tools.compare.command:compare", "Run a script under several strategies, side by side."
)
add_command(CHOOSE, "advise", "paceline.tools.advise.command:advise", "Say what would make a recorded run faster.")
add_command(CHOOSE, "tune", "paceline.tools.tune.command:tune", "Search over the hyperparameters of a script.")
add_command(CHOOSE, "reproduce", "paceline.tools.reproduce.command:reproduce", "Run, draw and judge what papers claim.")
add_command(KEEP, "serve", "paceline.serve.command:serve", "Serve jobs that come and go, and keep their state.")
add_command(KEEP, "relay", "paceline.tools.relay:relay", "Serve the published versions of a job to many readers.")
add_command(KEEP, "snapshot", "paceline.snapshots.command:app", "List, check and convert snapshots of a job.")
add_command(
    KEEP, "keys", "paceline.job.credentials.command:app", "Make and revoke keys for jobs over several machines."
)


def check_values(_app: App, _commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Raise UsageError for fractions in place of whole numbers, which cyclopts would round, and for unusable text."""
    for argument in arguments:
        kinds = (argument.hint, *get_args(argument.hint))
        for token in argument.tokens:
            if "\0" in token.value:
                raise UsageError(f"{argument.name} is {token.value[:40]!r}, expected a text without zero bytes")
            is_whole = int in kinds and float not in kinds
            expected = instead_of(token.value) if is_whole else ""
            if argument.name != SCRIPT_ARGUMENTS and ENDLESS_NUMBER.search(token.value):
                expected = f"no number of more than {MOST_DIGITS} digits"
            if expected:
                raise UsageError(f"{argument.name} is {token.value[:40]}, expected {expected}")


def instead_of(text: str) -> str:
    """Return what is expected instead of a number that is not whole or is too large; "" for any other text.

    >>> instead_of("1.5"), instead_of("9" * 30), instead_of("2.0"), instead_of("x")
    ('a whole number', 'a whole number of at most 18 digits', '', '')
    """
    try:
        number = float(text)
    except ValueError:
        return ""
    if abs(number) > 10**MOST_DIGITS:
        return f"a whole number of at most {MOST_DIGITS} digits"
    return "" if number.is_integer() else "a whole number"


app.register_install_completion_command(help="Have the shell complete commands and options.")
for flag in ("--help", "--version", "--install-completion"):
    app[flag].group = OPTIONS
app.config = (take_config, check_values)


def main() -> None:
    """Run the command line and exit: 0, 2 for a usage error, 1 for another failure, or the job's exit code."""
    occupy_closed_streams()
    show_any_text()
    code = answer(sys.argv[1:])
    lost = end_output()
    if lost is not None and not isinstance(lost, BrokenPipeError):  # a reader that has gone wants no more
        print(f"paceline: standard output: {explain(lost)}", file=sys.stderr)
    sys.exit(code if lost is None else code or EXIT_FAILURE)


def answer(tokens: Sequence[str]) -> int:
    """Run one command and return its exit code; errors go to stderr in one line."""
    options, script = split_at_script(tokens)
    wants_traceback = TRACEBACK_FLAG in options
    if options[:1] not in (["run"], ["join"]):  # they hand it on to their workers
        options = [token for token in options if token != TRACEBACK_FLAG]
    if options[:1] == ["compare"]:
        options = with_module(options)
    try:
        require_working_folder()
        explain_in_full(options)
        return app([*options, END_OF_OPTIONS, *script] if script else options)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except (PacelineError, CycloptsError) as error:
        if wants_traceback:
            traceback.print_exception(error)
        print(f"paceline: {for_terminal(str(error))}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, UsageError | CycloptsError) else EXIT_FAILURE
    except (OSError, MemoryError, RuntimeError) as error:
        if wants_traceback or not is_shortage(error):
            raise
        if not isinstance(end_output() or error, BrokenPipeError):
            print(f"paceline: {explain(error)}", file=sys.stderr)
        return EXIT_FAILURE


def explain_in_full(options: Sequence[str]) -> None:
    """Have the help of a command say all that its function says, instead of its line in the list of commands."""
    command = next((token for token in options if not token.startswith("-")), "")
    if HELP_FLAGS.isdisjoint(options) or command not in app or app[command].default_command is None:
        return  # no help is wanted, or it has commands of its own
    app[command].help = None


def require_working_folder() -> None:
    """Raise UsageError when the working folder is gone: torch and scripts need one."""
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
    >>> split_at_script(["tune", "-m", "2", "search.yaml", "-m", "package.train", "-n", "9"])
    (['tune', '-m', '2', 'search.yaml'], ['-m', 'package.train', '-n', '9'])
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
        elif before == 1 and names_module(tokens, position):
            return list(tokens[:position]), list(tokens[position:])
        position += 1 if token in flags or "=" in token or not token.startswith("-") else 2
    return list(tokens), []


def names_module(tokens: Sequence[str], position: int) -> bool:
    """Return whether a module is named here instead of a script: `-m NAME`; `-m 2` is a number of servers."""
    following = tokens[position + 1 : position + 2]
    return tokens[position] == "-m" and bool(following) and following[0][:1].isidentifier()


def with_module(options: Sequence[str]) -> list[str]:
    """Return the options of `compare`, whose script may stand anywhere, with `-m NAME` as `--module NAME`.

    >>> with_module(["compare", "-m", "2", "-m", "package.train", "--", "-m", "x"])
    ['compare', '-m', '2', '--module', 'package.train', '--', '-m', 'x']
    """
    stop = options.index(END_OF_OPTIONS) if END_OF_OPTIONS in options else len(options)
    return [
        "--module" if place < stop and names_module(options, place) else option for place, option in enumerate(options)
    ]


def switches() -> frozenset[str]:
    """Return the options before a script that take no value, those in groups of options among them."""
    parameters = [each for command in (run, join) for each in inspect.signature(command).parameters.values()]
    defaults = {parameter.name: parameter.default for parameter in parameters}
    for group in [default for default in defaults.values() if is_dataclass(default)]:
        defaults |= {field.name: getattr(group, field.name) for field in fields(group)}
    names = [name.replace("_", "-") for name, default in defaults.items() if isinstance(default, bool)]
    return frozenset({*HELP_FLAGS, TRACEBACK_FLAG, *(f"{no}{name}" for name in names for no in ("--", "--no-"))})
