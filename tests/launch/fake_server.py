"""A server that keeps the launcher's side of the bargain and notes down what it is told.

`python fake_server.py [--behaviour=WORD] <spec> <rank>`: with no word it publishes an address, obeys `stop`, and ends
when its standard input does.
"""

import os
import sys
from pathlib import Path

from paceline.launch.spec import ClusterSpec


def main() -> None:
    *words, spec_path, rank = sys.argv[1:]
    behaviour = words[0].removeprefix("--behaviour=") if words else ""
    run_dir = Path(ClusterSpec.read(Path(spec_path)).run_dir)
    if behaviour == "fail-at-start" and rank == "1":
        print("no room for the parameters", file=sys.stderr)
        sys.exit(7)
    if behaviour != "silent":
        publish(run_dir, rank)
    print("listening")
    if behaviour == "die-when-told":
        sys.stdin.readline()
        os.abort()
    serve(run_dir / f"told-{rank}", stubborn=behaviour == "stubborn")


def publish(run_dir: Path, rank: str) -> None:
    unfinished = run_dir / f".server-{rank}"
    unfinished.write_text(f"fake://{rank}\n")
    unfinished.rename(run_dir / f"server-{rank}.address")


def serve(notes: Path, *, stubborn: bool) -> None:
    with notes.open("w") as file:
        for line in sys.stdin:
            file.write(line)
            file.flush()
            if line == "stop\n" and not stubborn:
                return


if __name__ == "__main__":
    main()
