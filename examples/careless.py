"""Mistakes that people make, and what Paceline says to each: a dozen small jobs, one after another.

Each job is a script of a few lines with one mistake in it. Printed are what was done, what the job wrote to stderr and
stdout, line by line as it came, and its exit code. All of it takes a minute or two, and leaves nothing behind.

    python examples/careless.py            # all of them
    python examples/careless.py nan fork   # some, by their names
    python examples/careless.py --list     # the names

docs/troubleshooting.md has these messages and more, with causes and remedies.
"""

import os
import resource
import subprocess
import sys
import tempfile
import textwrap
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

LIMIT_S = 120.0  # for one job; the longest takes about 15 s

MODEL = """
import os, signal, sys, time
import torch
import paceline

paceline.init()
torch.manual_seed(paceline.rank())
model = torch.nn.Linear(32, 1)
optimizer = paceline.distributed(torch.optim.SGD(model.parameters(), lr=0.01), model=model)

def step(loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

def batch():
    return torch.randn(8, 32)
"""

TABLE = """
import torch
import paceline

ps = paceline.connect()
w = ps.table("w", shape=(4,), update=paceline.update.SGD(lr=0.1))
"""


@dataclass(frozen=True)
class Mistake:
    """One thing that is done wrongly, and what has to be said about it."""

    name: str
    did: str  # in one sentence
    script: str
    told: str  # what one of the lines has to contain
    exit_code: int = 0
    options: tuple[str, ...] = ()
    before: Callable[[], None] | None = None  # runs in the process of the launcher, before anything of Paceline


def small_files() -> None:
    """Let no file grow beyond 40 kB, as on a disk that is nearly full."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, resource.RLIM_INFINITY))


MISTAKES = [
    Mistake(
        "nan",
        "The loss of worker 1 is NaN in one of five steps.",
        MODEL
        + """
for number in range(5):
    spoiled = float("nan") if number == 2 and paceline.rank() == 1 else 1.0
    step(model(batch()).square().mean() * spoiled)
""",
        "a push of 'model' was refused: ",
    ),
    Mistake(
        "clock",
        "Workers push and pull in a loop, and never call clock().",
        TABLE
        + """
for _ in range(5):
    w.push(w.pull() - 1.0)
ps.close()
""",
        "Call clock() once a step",
    ),
    Mistake(
        "loops",
        "Worker 0 makes 3 steps and calls barrier(); worker 1 makes 6. Each wait ends after 8 s (--timeout 8).",
        MODEL
        + """
for _ in range(3 if paceline.rank() == 0 else 6):
    step(model(batch()).square().mean())
paceline.barrier()
""",
        "None of these can go on",
        exit_code=1,
        options=("--timeout", "8"),
    ),
    Mistake(
        "shard",
        "All workers read the same batches, as paceline.shard(loader) was forgotten.",
        MODEL
        + """
torch.manual_seed(7)
samples = torch.randn(80, 32)
for inputs in torch.utils.data.DataLoader(samples, batch_size=8):
    step(model(inputs).square().mean())
""",
        "did the script forget paceline.shard(loader)?",
    ),
    Mistake(
        "dtype",
        "A complex gradient is pushed to a table of float32. (Integers and other floats are converted.)",
        TABLE
        + """
w.push(torch.fft.fft(torch.ones(4)))
ps.clock()
""",
        "is a tensor (4,) of complex64, expected",
        exit_code=1,
    ),
    Mistake(
        "shape",
        "A gradient of shape (3,) is pushed to a table of shape (4,).",
        TABLE
        + """
w.push(torch.ones(3))
ps.clock()
""",
        "a push to table 'w' has shape (3,), expected (4,)",
        exit_code=1,
    ),
    Mistake(
        "fork",
        "The script calls os.fork(), and the child goes on with the training loop.",
        MODEL
        + """
step(model(batch()).square().mean())
child = os.fork()
step(model(batch()).square().mean())  # both come here
if child != 0:
    print("the child ended with exit code", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""",
        "this process was forked from the worker",
    ),
    Mistake(
        "notebook",
        "A cell of a notebook that opens a table is run twice, the second time with another shape.",
        TABLE
        + """
again = ps.table("w", shape=(4,), update=paceline.update.SGD(lr=0.1))  # the same cell: the same table
other = ps.table("w", shape=(5,), update=paceline.update.SGD(lr=0.1))  # the cell was edited
""",
        "worker 0 has already opened table 'w'",
        exit_code=1,
        options=("--workers", "1"),
    ),
    Mistake(
        "disk",
        "The disk is full: no file may grow beyond 40 kB (RLIMIT_FSIZE), and the trace of the run wants more.",
        MODEL
        + """
for _ in range(600):
    step(model(batch()).square().mean())
""",
        "ends here: File too large. Training goes on",
        before=small_files,
    ),
    Mistake(
        "killed",
        "Worker 1 is killed in its third step (SIGKILL), as the kernel does when memory runs out.",
        MODEL
        + """
for number in range(6):
    if number == 2 and paceline.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    step(model(batch()).square().mean())
""",
        "was killed by SIGKILL; the others go on without it",
        exit_code=75,
    ),
    Mistake(
        "hung",
        "Worker 1 is stopped for 9 s in its third step (SIGSTOP), then continued. The others wait for it.",
        MODEL
        + """
for number in range(6):
    if number == 2 and paceline.rank() == 1:
        alarm = f"import os, time; time.sleep(9); os.kill({os.getpid()}, {int(signal.SIGCONT)})"
        import subprocess
        subprocess.Popen([sys.executable, "-c", alarm])
        os.kill(os.getpid(), signal.SIGSTOP)
    step(model(batch()).square().mean())
""",
        "waiting for",
    ),
]


def main() -> None:
    """Run the jobs that are asked for, and end with 1 if a mistake was not told."""
    args = parse()
    chosen = [mistake for mistake in MISTAKES if not args.names or mistake.name in args.names]
    if args.list:
        print("\n".join(f"{mistake.name:10} {mistake.did}" for mistake in chosen))
        return
    untold = [mistake.name for number, mistake in enumerate(chosen, 1) if not made(mistake, number, len(chosen))]
    print(f"\n{len(chosen) - len(untold)} of {len(chosen)} mistakes were told" + "".join(f"; not {n}" for n in untold))
    sys.exit(1 if untold else 0)


def made(mistake: Mistake, number: int, num: int) -> bool:
    """Make one mistake, print what comes of it, and return whether it was told as expected."""
    print(f"\n=== {number} of {num}: {mistake.name} ===\n{mistake.did}\n", flush=True)
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="careless-") as folder:
        script = Path(folder, f"{mistake.name}.py")
        script.write_text(mistake.script.lstrip(), encoding="utf-8")
        options = ["--quiet", "--no-progress", *mistake.options]
        done = subprocess.run(
            [sys.executable, "-m", "paceline", "run", *options, str(script)],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": folder},
            preexec_fn=mistake.before,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    print(textwrap.indent(done.stdout.rstrip() or "(nothing)", "    "))
    print(f"\nexit code {done.returncode}, after {time.monotonic() - began_s:.0f} s", flush=True)
    return mistake.told in done.stdout and done.returncode == mistake.exit_code


def parse() -> Namespace:
    """Read the command line."""
    parser = ArgumentParser(description="Make mistakes, and see what Paceline says.")
    names = [mistake.name for mistake in MISTAKES]
    parser.add_argument("names", nargs="*", help=f"which mistakes: {', '.join(names)}; all by default")
    parser.add_argument("--list", action="store_true", help="print the mistakes, and make none")
    args = parser.parse_args()
    unknown = [name for name in args.names if name not in names]
    if unknown:
        parser.error(f"there is no mistake {', '.join(unknown)}; there are {', '.join(names)}")
    return args


if __name__ == "__main__":
    main()
