"""`kill -9` of what holds the state, beside others: `python benchmarks/kills_beside.py [--only ray,ddp] [--json]`.

Every system trains the same model with two workers, the same gradients and the same moments of its kills, counted in
its own steps, and once more without kills. Told are: how long it takes from a kill to the first step that is new, how
many steps are made again, whether the values at the end are those without kills, and what has to be set up for it to go
on at all. Some need an environment of their own: `python benchmarks/peers/setup.py torchft tf`; Ray comes with
`pip install 'paceline[ray]'`.
"""

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
from typing import Annotated, Final, NamedTuple, cast

import psutil
from cyclopts import App, Parameter
from measuring import machine, print_json, progress

PEERS: Final = Path(__file__).resolve().parent / "peers"
CLOCKS_A_KILL: Final = 40
CLOCKS_AFTER: Final = 200  # the last kill, so that whatever was killed is back before the end
TIMEOUT_S: Final = 300.0  # of a run, from its last kill on, and of what comes between two
POLL_S: Final = 0.02
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
        "nothing: training begins anew",
        (*_TORCHRUN, "killed_ddp.py", "FOLDER", "CLOCKS"),
    ),
    System(
        "ddp+saves",
        "worker",
        "saving and loading in the script",
        (*_TORCHRUN, "killed_ddp.py", "FOLDER", "CLOCKS", "saves"),
    ),
    System(
        "torchft", "worker", "a scheduler that starts it again", ("killed_torchft.py", "FOLDER", "CLOCKS"), "torchft"
    ),
    System("ray", "server actor", "nothing: training begins anew", ("killed_ray.py", "FOLDER", "CLOCKS")),
    System(
        "ray+saves", "server actor", "saving and loading in the actor", ("killed_ray.py", "FOLDER", "CLOCKS", "saves")
    ),
    System(
        "tf",
        "server",
        "saving, and a scheduler that starts all again",
        ("killed_tf.py", "FOLDER", "CLOCKS"),
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
def kills_beside(
    *,
    kills: int = 5,
    only: str = "",
    seed: int = 1,
    picture: Path | None = None,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Kill, and print what it costs.

    Parameters
    ----------
    kills
        How many, of each system.
    only
        Names of systems, with commas between them; all that are installed by default.
    seed
        Of the moments of the kills.
    picture
        Where to draw the stalls; by default nowhere.
    json
        Print only one line of JSON on stdout.
    """
    wanted = {name.strip() for name in only.split(",")} if only else {system.name for system in SYSTEMS}
    rows = []
    for system in SYSTEMS:
        if system.name not in wanted:
            continue
        if not Path(system.python).exists():
            progress(f"{system.name}: not installed (python benchmarks/peers/setup.py {system.environment})")
            continue
        try:
            rows.append(measure(system, kills, seed))
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            progress(f"{system.name} did not come to its end: {error}")
            continue
        progress(describe(rows[-1]))
    if picture is not None:
        draw(rows, picture)
    if json:
        print_json({"name": "kills_beside", "machine": machine(), "systems": rows})
    return 0


def measure(system: System, num_kills: int, seed: int) -> dict[str, object]:
    """Run a system with kills and without, and return what they cost."""
    num_clocks = CLOCKS_A_KILL * num_kills + CLOCKS_AFTER
    costs, digests = run(system, num_clocks, num_kills, random.Random(seed))
    _, calm = run(system, num_clocks, 0, random.Random(seed))
    stalls = sorted(kill.stall_ms for kill in costs)
    return {
        "system": system.name,
        "killed": system.killed,
        "needs": system.needs,
        "kills": len(costs),
        "stall_p50_ms": statistics.median(stalls),
        "stall_worst_ms": stalls[-1],
        "stalls_ms": stalls,
        "steps_again": statistics.mean(kill.num_again for kill in costs),
        "same_bytes": len(digests | calm) == 1,
    }


def draw(rows: list[dict[str, object]], path: Path) -> None:
    """Draw each stall as a point, a line for each system, on a logarithmic scale."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 0.9 + 0.42 * len(rows)), dpi=140, facecolor="white", layout="constrained")
    axes = figure.subplots()
    for place, row in enumerate(reversed(rows)):
        stalls = cast("list[float]", row["stalls_ms"])
        colour = "#0072B2" if row["system"] == "paceline" else "#D55E00"
        axes.scatter([stall / 1e3 for stall in stalls], [place] * len(stalls), s=30, color=colour, alpha=0.6)
        kept = "same values" if row["same_bytes"] else "other values"
        again = f"{row['steps_again']:.0f} steps again, " if row["steps_again"] else ""
        axes.annotate(
            f"{again}{kept}",
            (1.01, place),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=8,
            color="#444444",
        )
    axes.set_yticks(range(len(rows)), [f"{row['system']} ({row['killed']})" for row in reversed(rows)])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xscale("log")
    axes.set_xlim(0.04, 60)
    axes.set_xticks([0.1, 1, 10], ["0.1", "1", "10"])
    axes.grid(axis="x", color="#dddddd")
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    axes.set_xlabel("seconds from kill -9 to the first step that is new")
    figure.savefig(path)


def describe(row: dict[str, object]) -> str:
    """Return one line about a system."""
    return (
        f"{row['system']}: {row['kills']} kills of its {row['killed']}, {row['stall_p50_ms']:,.0f} ms in the middle, "
        f"{row['stall_worst_ms']:,.0f} at worst, {row['steps_again']:.1f} steps again, "
        f"{'the same' if row['same_bytes'] else 'other'} values; needs {row['needs']}"
    )


def run(system: System, num_clocks: int, num_kills: int, chance: random.Random) -> tuple[list[Kill], set[str]]:
    """Run a system to its end while it is killed so often; return what each kill cost, and the values' digests.

    Raises RuntimeError when it does not come to its end.
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
            for number in range(num_kills):
                wait_for_clock(folder, process, CLOCKS_A_KILL * (number + 1))
                time.sleep(chance.uniform(0.0, 0.1))
                moments.append(kill(folder, process, system, chance))
            process.wait(TIMEOUT_S)
        finally:
            end(process)
        if process.returncode:
            raise RuntimeError(f"{system.name} ended with code {process.returncode}:\n{tail(folder)}")
        return [cost(steps_of(folder), moment) for moment in moments], digests_of(folder)


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
