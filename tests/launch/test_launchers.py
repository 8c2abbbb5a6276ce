"""Scripts under launchers that know nothing of Paceline: the real ones, where they are installed."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from tests.launch.launching import processes_of, wait_gone
from tests.launch.slurm import slurm
from tests.launch.warm import run_job

from paceline.cli import answer

TIMEOUT_S = 200.0
LEFT_WITHIN_S = 30.0
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

TRAIN = """
import torch, paceline
paceline.init()
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = paceline.distributed(torch.optim.SGD(model.parameters(), lr=0.1), consistency="bsp")
data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 2))
for x, y in paceline.shard(torch.utils.data.DataLoader(data, batch_size=4), seed=1):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
with optimizer.snapshot():
    bits = "".join(p.detach().numpy().tobytes().hex() for p in model.parameters())
print(f"worker {paceline.rank()} of {paceline.size()} has {bits}\\n", end="")  # at once: others write there too
"""

# Without torch.optim, which imports as much again as all the rest.
ADD_UP = """
import torch, paceline
with paceline.connect() as ps:
    table = ps.table("w", shape=(1,), update=paceline.update.Add(), scale="sum")
    table.push([2.0 ** ps.rank])
    ps.clock()
    total = ps.exchange.all_reduce(torch.ones(1), "sum", None).result().item()
    print(f"worker {ps.rank} of {ps.size} has {table.pull().item():g} and {total:g}\\n", end="")
"""
ADDED_UP = [f"worker {rank} of 2 has 3 and 2" for rank in range(2)]

STAY = """
import sys
import paceline
with paceline.connect() as ps:
    table = ps.table("w", shape=(1,), update=paceline.update.Add(), scale="sum")
    print("there", flush=True)
    for line in sys.stdin:
        table.push([1.0])
        ps.clock()
        print("value", table.pull().item(), flush=True)
"""


def outcome(command: list[str], script: Path, variables: dict[str, str]) -> tuple[list[str], str]:
    """Run the script to its end; return what workers said, in order, and all that went to stderr."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    ended = subprocess.run([*command, str(script)], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert ended.returncode == 0, ended.stderr
    return sorted(ended.stdout.splitlines()), ended.stderr


def write(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(text)
    return path


def test_torchrun_learns_what_paceline_run_does(tmp_path: Path) -> None:
    script, folder = write(tmp_path, TRAIN), tmp_path / "runs"
    expected = sorted(run_job("-n", "2", script).stdout.splitlines())

    lines, told = outcome([*TORCHRUN], script, {"PACELINE_RUN_DIR": str(folder)})

    assert [f"[{line[:8]}] {line}" for line in lines] == expected  # to the last bit
    assert told.count("paceline: torchrun, 2 workers on 1 node, 1 server beside rank 0\n") == 1
    [run_dir] = folder.iterdir()
    assert {path.name for path in run_dir.iterdir()} == {"spec.json", "cluster.json", "trace"}
    assert processes_of(run_dir) == set()


PARTING = """
import functools, sys
import paceline
from paceline.launch.rendezvous import join
join.announcing_wait = functools.partial(join.announcing_wait, after_s=0.0)
with paceline.connect() as ps:
    if ps.rank == 1:
        open(sys.argv[1]).close()
"""
TASK = "SLURM_PROCID={rank} SLURM_LOCALID={rank} " + shlex.quote(sys.executable) + ' "$@" & tasks="$tasks $!";'
SRUN = (
    "sh",
    "-c",
    " ".join(TASK.format(rank=rank) for rank in range(2)) + " for i in $tasks; do wait $i || exit; done",
    "srun",
)
STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "2"}


COUNT_ON = """
import os, paceline
ps = paceline.init()
table = ps.table("w", shape=(1,), update=paceline.update.Add(), scale="sum")
told = paceline.resumed()
for clock in range(told.clock if told else 0, int(os.environ["STOP_AT"])):
    table.push([2.0 ** ps.rank])
    ps.clock()
written = paceline.snapshot(os.environ["PACELINE_SNAPSHOTS"])
if written:
    written.result(60)
print(f"worker {ps.rank} goes on from {told.clock if told else None} and has {table.pull().item():g}\\n", end="")
"""


def test_under_another_launcher_a_job_goes_on_from_its_snapshots_where_there_are_some(tmp_path: Path) -> None:
    script, kept = write(tmp_path, COUNT_ON), str(tmp_path / "kept")
    both = {**STEP, "PACELINE_SNAPSHOTS": kept, "PACELINE_RESUME": kept, "XDG_CACHE_HOME": str(tmp_path)}
    for stop_at, begins in ((2, None), (5, 2)):  # the second is started as the first one
        lines, told = outcome([*SRUN], script, {**both, "STOP_AT": str(stop_at)})
        assert lines == [f"worker {rank} goes on from {begins} and has {3 * stop_at}" for rank in range(2)]
        assert told.count(f"paceline: goes on from {kept}/snapshot-1, at clock 2\n") == (begins is not None)


@pytest.mark.parametrize(
    ("command", "variables"),
    [pytest.param(TORCHRUN, {}, id="torchrun", marks=pytest.mark.campaign), pytest.param(SRUN, STEP, id="srun")],
)
def test_a_process_that_others_need_says_why_it_stays(
    command: tuple[str, ...], variables: dict[str, str], tmp_path: Path
) -> None:
    script, gate = write(tmp_path, PARTING), tmp_path / "gate"
    os.mkfifo(gate)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PACELINE_RUN_DIR": str(tmp_path / "runs"), **variables}
    with subprocess.Popen(
        [*command, str(script), str(gate)], env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stderr is not None
        line = next(line for line in iter(process.stderr.readline, "") if "its process stays" in line)
        gate.write_text("")
        rest = process.communicate(timeout=TIMEOUT_S)[1]

    said = "worker 0 has ended its script; its process stays until worker 1 has left the job, as others need its"
    assert line == f"paceline: {said} servers or its folder\n"
    assert "its process stays" not in rest


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no mpirun: install Open MPI")
def test_open_mpi_with_a_rank_as_the_server(tmp_path: Path) -> None:
    command = ["mpirun", "-n", "3", "--oversubscribe", "--bind-to", "none", sys.executable]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    folder = tmp_path / "runs"

    lines, told = outcome(
        command, write(tmp_path, ADD_UP), {**root, "PACELINE_SERVERS": "ranks:1", "PACELINE_RUN_DIR": str(folder)}
    )

    assert lines == ADDED_UP
    assert "paceline: Open MPI, 2 workers on 1 node, 1 server as rank 2\n" in told
    assert [path.is_dir() for path in folder.iterdir() if path.name != ".lock"] == [True]  # of the job: no invitation


def test_slurm_runs_the_batch_script_that_is_written_for_it(tmp_path: Path) -> None:
    script, batch, output = write(tmp_path, ADD_UP), tmp_path / "add-up.sbatch", tmp_path / "output"
    assert answer(["launch", "--emit", "slurm", "--name", "add-up", "--out", str(batch), "-n", "2", str(script)]) == 0
    os.mkfifo(output)  # ends when the job does
    with slurm(tmp_path) as environment:
        path = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
        for option in ("--test-only", f"--output={output}"):
            call = ["sbatch", option, str(batch)]
            done = subprocess.run(
                call, env={**environment, "PATH": path}, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S
            )
            assert done.returncode == 0, done.stderr
        told = subprocess.run(["cat", str(output)], capture_output=True, text=True, timeout=TIMEOUT_S)

    lines = told.stdout.splitlines()
    assert sorted(line for line in lines if line.startswith("worker")) == ADDED_UP, told.stdout
    assert "paceline: Slurm, 2 workers on 1 node, 1 server beside rank 0" in lines
    [run_dir] = (tmp_path / "add-up-runs").glob("paceline-*")
    assert (run_dir / "trace").is_dir()


@contextmanager
def started(folder: Path, rank: int) -> Iterator[subprocess.Popen[str]]:
    """One of two workers whose launcher does no more than set variables."""
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
        "PACELINE_RUN_DIR": str(folder / "runs"),
        "PACELINE_START_TIMEOUT_S": f"{TIMEOUT_S:.0f}",
    }
    with subprocess.Popen(
        [sys.executable, str(folder / "script.py")],
        env={**os.environ, **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def say(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go on\n")
    process.stdin.flush()


def hear(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_others_go_on_without_a_killed_worker_that_may_come_again_and_nothing_survives_a_killed_rank_0(
    tmp_path: Path,
) -> None:
    write(tmp_path, STAY)
    with ExitStack() as running:
        first, second = (running.enter_context(started(tmp_path, rank)) for rank in range(2))
        assert [hear(first), hear(second)] == ["there", "there"]
        [run_dir] = [path for path in (tmp_path / "runs").iterdir() if path.is_dir()]
        family = processes_of(run_dir)
        assert len(family) == 2  # the server and the guard

        second.kill()
        say(first)
        assert hear(first) == "value 1.0"  # after the clock of all workers: of those that are left
        for life in range(1, 3):
            again = running.enter_context(started(tmp_path, 1))
            assert hear(again) == "there"
            say(again)
            say(first)
            assert [hear(again), hear(first)] == 2 * [f"value {1.0 + 2 * life}"]
            again.kill()
            again.wait()
        first.kill()

        assert wait_gone(family, LEFT_WITHIN_S) == set()
        assert first.stderr is not None
        said = first.stderr.read()
    assert said.count("paceline: worker 1 is given up: its process ended; the others go on without it\n") in (2, 3)
    assert {path.name for path in run_dir.iterdir()} <= {"spec.json", "cluster.json", "trace"}


def test_dmlc_with_roles_and_without_numbers(tmp_path: Path) -> None:
    command = [sys.executable, str(write(tmp_path, ADD_UP))]
    variables = {
        **os.environ,
        "DMLC_NUM_WORKER": "1",
        "DMLC_NUM_SERVER": "1",
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": "1",
        "XDG_CACHE_HOME": str(tmp_path),
    }
    with ExitStack() as running:
        processes = [
            running.enter_context(
                subprocess.Popen(
                    command, env={**variables, "DMLC_ROLE": role}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
                )
            )
            for role in ("scheduler", "server", "worker")
        ]
        told = [process.communicate(timeout=TIMEOUT_S) for process in processes]

    assert [process.returncode for process in processes] == [0, 0, 0]
    assert [out for out, _ in told] == [b"", b"", b"worker 0 of 1 has 1 and 1\n"]
    assert told[0][1] == b"paceline: DMLC, 1 worker on 1 node, 1 server of its own\n"
