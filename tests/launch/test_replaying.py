"""A real job that is recorded and killed: what its servers had until then is there again, on the command line too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.launch.launching import processes_of, wait_gone

from paceline.cli import answer
from paceline.launch.replaying import replay_server, tensors_of
from paceline.server.record_follower import Moment

TIMEOUT_S = 200.0
PROGRAM = (sys.executable, "-c", "from paceline.cli import main; main()")
SCRIPT = """
import sys, threading
import torch
import paceline

paceline.init()
model = torch.nn.Linear(4, 3)
optimizer = paceline.distributed(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model=model)
for step in range(6):
    optimizer.zero_grad()
    model(torch.full((2, 4), float(paceline.rank() + step))).sum().backward()
    optimizer.step()
paceline.barrier()
if paceline.rank() == 0:
    torch.save(torch.cat([part.detach().flatten() for part in model.parameters()]), sys.argv[1])
    print("ready", flush=True)
threading.Event().wait()
"""


def test_a_run_that_is_killed_is_replayed_to_its_last_event(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, values, run_dir = tmp_path / "script.py", tmp_path / "values.pt", tmp_path / "run"
    script.write_text(SCRIPT)
    command = [*PROGRAM, "run", "--no-progress", "--run-dir", str(run_dir)]
    with subprocess.Popen(
        [*command, "--record", str(script), str(values)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert any("ready" in line for line in process.stdout)
        pids = processes_of(run_dir)
        os.kill(process.pid, signal.SIGKILL)
        process.stdout.read()
    assert wait_gone(pids, TIMEOUT_S) == set()

    found: list[torch.Tensor] = []

    def look(moment: Moment) -> None:
        found.append(tensors_of(moment, "model")["values"])

    replayed = replay_server(run_dir, 0, look=look)
    assert torch.equal(found[0], torch.load(values, weights_only=True))
    assert (replayed.is_proved, replayed.clocks) == (False, {"model": 6})

    assert answer(["replay", str(run_dir), "--show", "model"]) == 0
    told = capsys.readouterr().out
    assert f"server 0: {replayed.num_events} events, to the end of its record: its process was killed" in told
    assert "model.values (15,) float32: " in told
    assert answer(["replay", str(run_dir), "--until", "clock:99"]) == 0
    assert "server 0: 'clock:99' did not come" in capsys.readouterr().out
    assert answer(["replay", str(run_dir), "--until", "clock:3", "--step"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].endswith("table 'model' has reached clock 3")
    assert len(lines) - 2 == int(lines[-2].split()[5].rstrip(":"))
    assert answer(["replay", str(run_dir), "--server", "1"]) == 2
    assert "--server is 1, expected one that has a record: 0" in capsys.readouterr().err


def test_what_has_no_record_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit('it has begun')\n")
    assert answer(["run", "--record", str(script)]) == 2
    assert "--record needs a folder that stays: name one with --run-dir" in capsys.readouterr().err
    assert answer(["replay", str(tmp_path)]) == 2
    assert "cannot read the cluster spec" in capsys.readouterr().err


DECIDING = """
import os, signal, sys
from pathlib import Path
import torch
import paceline
from paceline import update

marker = Path(sys.argv[1])
with paceline.connect() as ps:
    momentum = update.SGD(lr=0.1, momentum=0.9)
    rule = update.Merging(momentum, quorum=2, num_workers=3, grace_s=0.003)
    merged = ps.table("merged", shape=(65,), update=rule, consistency="asynchronous")
    life = paceline.Lifecycle(expire_after=2, floor=4, max_rows=30)
    rows = ps.table("rows", rows=2, update=momentum, consistency="ssp:2", life=life)
    for clock in range(12):
        generator = torch.Generator().manual_seed(100 * ps.rank + clock)
        merged.push(merged.pull() * 0.5 + torch.randn(65, generator=generator))
        ids = torch.randint(-40, 40, (12,), generator=generator)
        rows.push(ids[:6], torch.randn(6, 2, generator=generator))
        ps.clock()
        rows.pull(ids[4:])
        if ps.rank == 1 and clock == 5 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_servers_decide_by_time_and_by_reads_is_replayed_where_a_worker_is_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, marker, run_dir = tmp_path / "script.py", tmp_path / "killed", tmp_path / "run"
    script.write_text(DECIDING)
    options = ["--no-progress", "--record", "--workers", "3", "--servers", "2", "--on-crash", "restart"]
    command = [*PROGRAM, "run", *options, "--run-dir", str(run_dir), str(script), str(marker)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert (done.returncode, marker.exists()) == (0, True), done.stderr
    assert "record" not in done.stderr
    assert answer(["replay", str(run_dir)]) == 0
    told = capsys.readouterr().out
    assert told.count("its values are those that it had at the end, to the bit") == 2
    assert told.count("table 'merged'") == told.count("table 'rows'") == 2
