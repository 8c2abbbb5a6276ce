"""A server that keeps the launcher's side of the bargain and notes down what it is told.

`python fake_server.py [--behaviour=WORD [--role=data]] <spec> <rank>`: with no word it publishes an address, obeys
`stop`, and ends when its standard input does. In the role of a data server its address is its process id.
"""

import os
import sys
from pathlib import Path

from paceline.job.spec import ClusterSpec


def main() -> None:
    *words, spec_path, rank = sys.argv[1:]
    behaviour = words[0].removeprefix("--behaviour=") if words else ""
    role = words[1].removeprefix("--role=") if words[1:] else "server"
    run_dir = Path(ClusterSpec.read(Path(spec_path)).run_dir)
    if behaviour == "fail-at-start" and rank == "1":
        print("no room for the parameters", file=sys.stderr)
        sys.exit(7)
    if behaviour != "silent":
        publish(run_dir, role, rank)
    print("listening")
    if behaviour == "die-when-told":
        sys.stdin.readline()
        os.abort()
    serve(run_dir / f"told-{'' if role == 'server' else role}{rank}", stubborn=behaviour == "stubborn")


def publish(run_dir: Path, role: str, rank: str) -> None:
    unfinished = run_dir / f".{role}-{rank}"
    unfinished.write_text(f"fake://{rank}\n" if role == "server" else f"{os.getpid()}\n")
    unfinished.rename(run_dir / f"{role}-{rank}.address")


def serve(notes: Path, *, stubborn: bool) -> None:
    with notes.open("w") as file:
        for line in sys.stdin:
            file.write(line)
            file.flush()
            if line == "stop\n" and not stubborn:
                return


if __name__ == "__main__":
    main()
