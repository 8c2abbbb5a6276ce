"""`kill -9` of what holds the state, beside others: `python benchmarks/kills_beside.py [--only ray,ddp] [--json]`.

Every system trains the same model with two workers, the same gradients and the same moments of its kills, counted in
its own steps, and once more without kills; each but Paceline with its defaults and tuned for short stalls. Told are:
how long it takes from a kill to the first step that is new, how many steps are made again, how many gradients of
workers are in no step, whether the values at the end are those without kills, and what has to be set up for it to go on
at all. Some need an environment of their own: `python benchmarks/peers/setup.py torchft tf`; Ray comes with
`pip install 'paceline[ray]'`. `kills_beside.py draw PICTURE FILE...` draws the lines of JSON that these files have.
"""

import json as json_text
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import numpy as np
import psutil
from cyclopts import App, Parameter
from measuring import end_with_sigterm, machine, percentile, print_json, progress

PEERS: Final = Path(__file__).resolve().parent / "peers"
CLOCKS_AFTER: Final = 80  # and so many after the last kill
TIMEOUT_S: Final = 300.0  # of a run, from its last kill on, and of what comes between two
POLL_S: Final = 0.02
SHOWN_S: Final = 0.03, 600.0  # on the picture, with room for words on the right
NUM_BARS: Final = 60
ENVIRONMENTS: Final = Path(__file__).resolve().parent.parent / ".venv-peers"


@dataclass(frozen=True, slots=True)
class System:
    """One system, or one way to set it up.

    Args:
        name: of it.
        killed: what is killed.
        needs: what has to be set up so that it goes on.
        command: how it is started; FOLDER and CLOCKS stand for what it is told.
        environment: of Python, by name; "" for that of this command.
        server: a word on the command line of the process to kill; "" where it says itself which one that is.
    """

    name: str
    killed: str
    needs: str
    command: tuple[str, ...]
    environment: str = ""
    server: str = ""

    @property
    def python(self) -> str:
        """The Python that it runs with."""
        return str(ENVIRONMENTS / self.environment / "bin" / "python") if self.environment else sys.executable


_TORCHRUN: Final = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1000")
SYSTEMS: Final = (
    System(
        "paceline",
        "server",
        "nothing",
        ("-m", "paceline", "run", "-n", "2", "--quiet", "killed_paceline.py", "FOLDER", "CLOCKS"),
        server="paceline.launch.server",
    ),
    System(
        "ddp",
        "worker",
        "--max-restarts; training begins anew",
        (*_TORCHRUN, "killed_ddp.py", "FOLDER", "CLOCKS"),
    ),
    System(
        "ddp tuned",
        "worker",
        "--max-restarts, saving and loading in the script",
        (*_TORCHRUN, "--monitor-interval=0.01", "killed_ddp.py", "FOLDER", "CLOCKS", "tuned"),
    ),
    System(
        "torchft",
        "worker",
        "a lighthouse, a scheduler that starts workers again",
        ("killed_torchft.py", "FOLDER", "CLOCKS"),
        "torchft",
    ),
    System(
        "torchft tuned",
        "worker",
        "a lighthouse, a scheduler that starts workers again, timeouts",
        ("killed_torchft.py", "FOLDER", "CLOCKS", "tuned"),
        "torchft",
    ),
    System("ray", "server actor", "max_restarts; training begins anew", ("killed_ray.py", "FOLDER", "CLOCKS")),
    System(
        "ray tuned",
        "server actor",
        "max_restarts, saving and loading in the actor",
        ("killed_ray.py", "FOLDER", "CLOCKS", "tuned"),
    ),
    System(
        "tf",
        "server",
        "saving, a scheduler that starts all again",
        ("killed_tf.py", "FOLDER", "CLOCKS"),
        "tf",
    ),
    System(
        "tf tuned",
        "server",
        "saving, a scheduler that starts server and coordinator again",
        ("killed_tf.py", "FOLDER", "CLOCKS", "tuned"),
        "tf",
    ),
)


class Step(NamedTuple):
    """A step of a worker, and when it ended (seconds of the machine's clock)."""

    ended_s: float
    clock: int
    worker: str


@dataclass(frozen=True, slots=True)
class Kill:
    """What one kill cost.

    Args:
        stall_ms: from the kill to the end of the first step that is new.
        num_again: steps that were made before it, and are made again.
    """

    stall_ms: float
    num_again: int


app = App(name="kills_beside.py", help="Kill what holds the state, beside others.", help_format="plaintext")


@app.default
def measure(
    *,
    kills: int = 5,
    between: int = 60,
    only: str = "",
    seed: int = 1,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Kill, and print what it costs.

    Parameters
    ----------
    kills
        How many, of each system.
    between
        Clocks between two kills, 60 take about 4 s; torchft needs so many until a worker that was killed is back.
    only
        Names of systems, with commas between them; all that are installed by default.
    seed
        Of the moments of the kills.
    json
        Print only one line of JSON on stdout.
    """
    end_with_sigterm()
    wanted = {name.strip() for name in only.split(",")} if only else {system.name for system in SYSTEMS}
    rows = []
    for system in SYSTEMS:
        if system.name not in wanted:
            continue
        if not Path(system.python).exists():
            progress(f"{system.name}: not installed (python benchmarks/peers/setup.py {system.environment})")
            continue
        try:
            rows.append(costs_of(system, kills, between, seed))
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            progress(f"{system.name} did not come to its end: {error}")
            continue
        progress(describe(rows[-1]))
    if json:
        print_json({"name": "kills_beside", "machine": machine(), "systems": rows})
    return 0


def costs_of(system: System, num_kills: int, between: int, seed: int) -> dict[str, object]:
    """Run a system with kills and without, and return what they cost."""
    kills_at = range(between, between * num_kills + 1, between)
    num_clocks = between * num_kills + CLOCKS_AFTER
    costs, num_lost, digests = run(system, num_clocks, kills_at, random.Random(seed))
    _, _, calm = run(system, num_clocks, (), random.Random(seed))
    stalls = sorted(kill.stall_ms for kill in costs)
    return {
        "name": system.name,
        "killed": system.killed,
        "needs": system.needs,
        "kills": len(costs),
        "stall_p50_ms": statistics.median(stalls),
        "stall_p99_ms": percentile(stalls, 0.99),
        "stall_worst_ms": stalls[-1],
        "stalls_ms": stalls,
        "steps_again": statistics.mean(kill.num_again for kill in costs),
        "gradients_lost": num_lost / max(len(costs), 1),
        "same_bytes": len(digests | calm) == 1,
    }


@app.command
def draw(picture: Path, *files: Path) -> int:
    """Draw a histogram of the stalls of each system, on a logarithmic scale.

    Parameters
    ----------
    picture
        Where to.
    files
        The lines that were printed with `--json`, one or more in each.
    """
    from matplotlib.figure import Figure

    rows = merged([row for file in files for line in file.read_text().splitlines() for row in rows_of(line)])
    edges = np.geomspace(*SHOWN_S, NUM_BARS + 1)
    figure = Figure(figsize=(5.0, 0.8 + 0.42 * len(rows)), dpi=160, facecolor="white", layout="constrained")
    axes = figure.subplots()
    for place, (name, (stalls_ms, is_same)) in enumerate(reversed(rows.items())):
        shares, _ = np.histogram(np.array(stalls_ms) / 1e3, edges)
        colour = "#0072B2" if name == "paceline" else "#D55E00"
        axes.bar(edges[:-1], 0.8 * shares / max(shares.max(), 1), np.diff(edges), place, align="edge", color=colour)
        axes.axhline(place, color="#bbbbbb", linewidth=0.6)
        axes.annotate(
            f"{told(statistics.median(stalls_ms))} s, {'same' if is_same else 'other'} bytes",
            (0.99, place + 0.55),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="center",
            fontsize=9.5,
        )
    axes.set_yticks([place + 0.3 for place in range(len(rows))], reversed(rows), fontsize=10.5)
    axes.set_ylim(-0.05, len(rows))
    axes.set_xscale("log")
    axes.set_xlim(*SHOWN_S)
    axes.set_xticks([0.1, 1, 10], ["0.1", "1", "10"])
    axes.minorticks_off()
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    axes.set_xlabel("seconds from kill -9 to the first new step")
    figure.savefig(picture)
    return 0


def rows_of(line: str) -> list[dict[str, Any]]:
    """Return what a line of JSON has of each system."""
    return json_text.loads(line)["systems"]


def merged(rows: list[dict[str, Any]]) -> dict[str, tuple[list[float], bool]]:
    """Return the stalls of each system in all its rows, and whether the values were the same in all.

    >>> merged([{"name": "tf", "stalls_ms": [stall], "same_bytes": stall < 4.0} for stall in (3.0, 4.0)])
    {'tf': ([3.0, 4.0], False)}
    """
    found: dict[str, tuple[list[float], bool]] = {}
    for system in SYSTEMS:
        its = [row for row in rows if row["name"] == system.name]
        if its:
            found[system.name] = (
                [each for row in its for each in row["stalls_ms"]],
                all(row["same_bytes"] for row in its),
            )
    return found


def told(milliseconds: float) -> str:
    """Return it in seconds, to two digits.

    >>> told(93.1), told(6312.0), told(31200.0)
    ('0.093', '6.3', '31')
    """
    return f"{float(f'{milliseconds / 1e3:.2g}'):g}"


def describe(row: dict[str, object]) -> str:
    """Return one line about a system."""
    return (
        f"{row['name']}: {row['kills']} kills of its {row['killed']}, {row['stall_p50_ms']:,.0f} ms in the middle, "
        f"{row['stall_worst_ms']:,.0f} at worst, {row['steps_again']:.1f} steps again, "
        f"{row['gradients_lost']:.1f} gradients lost, "
        f"{'the same' if row['same_bytes'] else 'other'} values; needs {row['needs']}"
    )


def run(
    system: System, num_clocks: int, kills_at: Sequence[int], chance: random.Random
) -> tuple[list[Kill], int, set[str]]:
    """Run a system to its end while it is killed at these clocks.

    Returns what each kill cost, how many gradients are in no step, and the digests of the values. Raises RuntimeError
    when it does not come to its end.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-kills-") as place:
        folder = Path(place)
        words = {"FOLDER": place, "CLOCKS": str(num_clocks)}
        scripts = [str(PEERS / word) if word.endswith(".py") else words.get(word, word) for word in system.command]
        with (folder / "output").open("wb") as output:
            process = subprocess.Popen(
                [system.python, *scripts], stdout=output, stderr=output, start_new_session=True, cwd=place
            )
        moments: list[float] = []
        try:
            for clock in kills_at:
                wait_for_clock(folder, process, clock)
                time.sleep(chance.uniform(0.0, 0.1))
                moments.append(kill(folder, process, system, chance))
            process.wait(TIMEOUT_S)
        finally:
            end(process)
        if process.returncode:
            raise RuntimeError(f"{system.name} ended with code {process.returncode}:\n{tail(folder)}")
        steps = steps_of(folder)
        return [cost(steps, moment) for moment in moments], num_missing(steps, num_clocks), digests_of(folder)


def steps_of(folder: Path) -> list[Step]:
    """Return the steps of all workers, in the order in which they ended."""
    lines = [(path, line.split()) for path in folder.glob("steps.*") for line in path.read_text().splitlines()]
    return sorted(Step(float(words[1]), int(words[0]), path.name) for path, words in lines if len(words) == 2)


def wait_for_clock(folder: Path, process: "subprocess.Popen[bytes]", clock: int) -> None:
    """Block until all workers have come to a clock; raises RuntimeError if the system ends or stands still before."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        last = {step.worker: step.clock for step in steps_of(folder)}
        if last and min(last.values()) >= clock:
            return
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"clock {clock} was not reached:\n{tail(folder)}")
        time.sleep(POLL_S)


def kill(folder: Path, process: "subprocess.Popen[bytes]", system: System, chance: random.Random) -> float:
    """Kill a process that holds the state; return when."""
    if system.server:
        family = psutil.Process(process.pid).children(recursive=True)
        targets = [member.pid for member in family if system.server in words_of(member)]
    else:
        targets = [int(line) for line in (folder / "targets").read_text().split() if psutil.pid_exists(int(line))]
    moment = time.monotonic()
    os.kill(chance.choice(sorted(targets)), signal.SIGKILL)
    return moment


def words_of(process: psutil.Process) -> Sequence[str]:
    """Return the command line of a process, nothing where it has just ended."""
    with suppress(psutil.Error):
        return process.cmdline()
    return ()


def cost(steps: list[Step], moment: float) -> Kill:
    """Return what a kill at this moment cost."""
    done = {(step.worker, step.clock) for step in steps if step.ended_s < moment}
    last = max((clock for _, clock in done), default=-1)
    after = [step for step in steps if step.ended_s >= moment]
    new = next((step for step in after if step.clock > last), None)
    if new is None:  # it came after the last step
        return Kill(0.0, 0)
    again = {step.clock for step in after if step.ended_s < new.ended_s and (step.worker, step.clock) in done}
    return Kill(1e3 * (new.ended_s - moment), len(again))


def num_missing(steps: list[Step], num_clocks: int) -> int:
    """Return how many steps of workers there were not, in all lives of theirs."""
    done = {(step.worker, step.clock) for step in steps if step.clock >= 0}  # the Ray actor may ask for the first one
    return num_clocks * len({worker for worker, _ in done}) - len(done)


def digests_of(folder: Path) -> set[str]:
    """Return the digests of the values at the end, as each worker has them."""
    return {path.read_text() for path in folder.glob("digest.*")}


def tail(folder: Path) -> str:
    """Return the last lines that a system has written."""
    return "\n".join((folder / "output").read_text(errors="replace").splitlines()[-20:])


def end(process: "subprocess.Popen[bytes]") -> None:
    """End a system and all its processes."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(10.0)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    sys.exit(app())
