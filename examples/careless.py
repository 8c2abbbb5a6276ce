"""Mistakes that people make, and what Paceline says to each: a dozen small jobs, one after another.

Each job is a script of a few lines with one mistake in it. Printed are what was done, what the job wrote to stderr and
stdout, line by line as it came, and its exit code. All of it takes a minute or two, and leaves nothing behind.

    python examples/careless.py            # all of them
    python examples/careless.py nan fork   # some, by their names
    python examples/careless.py --list     # the names

docs/troubleshooting.md has these messages and more, with causes and remedies.
"""

import os
import subprocess
import sys
import tempfile
import textwrap
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path

from careless_mistakes import MISTAKES, Mistake

LIMIT_S = 120.0  # for one job; the longest takes about 15 s


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
