"""Stands for `paceline run`: writes the trace that the trial's parameters ask for, and ends as they say.

--do: good (a report for each of --reports), crash, hang, silent, diverge, wait (for a file named gate), late (a report
that goes on until it is told to stop). The loss of a report is --x divided by how many there were.
"""

import fcntl
import json
import signal
import sys
import time
import tomllib
from itertools import count
from pathlib import Path

config = Path(sys.argv[sys.argv.index("--config") + 1])
run_dir = Path(sys.argv[sys.argv.index("--run-dir") + 1])
told = tomllib.loads(config.read_text())
options = dict(arg.removeprefix("--").split("=") for arg in told["args"])
alive = Path("alive").open("a")  # noqa: SIM115 - held until this process is gone
fcntl.flock(alive, fcntl.LOCK_SH)
(run_dir / "trace").mkdir(parents=True)
trace = (run_dir / "trace" / "worker-0.jsonl").open("w", buffering=1)


def report(turn: int, loss: float | None) -> None:
    record = {"kind": "evaluated", "t": float(turn), "worker": 0, "clock": turn, "loss": loss, "accuracy": 0.5}
    trace.write(json.dumps(record) + "\n")


do, x = options.get("do", "good"), float(options.get("x", 1.0))
match do:
    case "crash":
        print("paceline: the last 1 lines that worker 0 wrote to stderr:\n    paceline: no data here")
        raise SystemExit(3)
    case "hang":
        signal.pause()
    case "late":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        for turn in count(1):
            report(turn, x / turn)
            time.sleep(0.02)
    case "wait":
        while not Path("gate").exists():
            time.sleep(0.02)
    case "diverge":
        report(1, None)
        raise SystemExit(0)
    case _:
        pass
for turn in range(1, 1 + (0 if do == "silent" else int(options.get("reports", 3)))):
    report(turn, x / turn)
