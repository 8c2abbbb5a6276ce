"""Stands for `paceline run`: writes the trace that the trial's parameters ask for, and ends as they say.

--do: good (a report for each of --reports), crash, hang, silent, diverge, wait (while the file named gate is a pipe),
late (goes on reporting until it is asked to stop). The loss of a report is --x divided by how many there were.
"""

import fcntl
import json
import signal
import sys
import tomllib
from pathlib import Path

MOST_LATE_REPORTS = 3000  # a minute of them

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
        print("[worker 0] paceline: no data here\npaceline: worker 0 ended with exit code 3; the run was stopped")
        raise SystemExit(3)
    case "hang":
        signal.pause()
    case "late":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        for turn in range(1, MOST_LATE_REPORTS):
            report(turn, x / turn)
            if signal.sigtimedwait({signal.SIGTERM}, 0.02):
                sys.exit(143)
        sys.exit("this trial was not told to stop")
    case "wait":
        Path("gate").read_bytes()  # blocks while it is a pipe that is not written to
    case "diverge":
        report(1, None)
        raise SystemExit(0)
    case _:
        pass
for turn in range(1, 1 + (0 if do == "silent" else int(options.get("reports", 3)))):
    report(turn, x / turn)
