"""A whole run, from its start to its exit code, with a fake server and scripts that need no tensors."""

import json
import os
import re
import stat
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.launch.launching import TIMEOUT_S, command, launch, write_script

from paceline.api.programs import PROGRAMS
from paceline.errors import EXIT_LOST, UsageError
from paceline.job.spec import read_token, write_token
from paceline.launch.crash_policy import CrashPolicy
from paceline.launch.local import prepare_run_dir, run_local
from paceline.launch.output import SCREEN_LINES, Console
from paceline.launch.plan import LocalRun
from paceline.observe.runs import read_run

PAUSE = "print('ready'); signal.pause()\n"


def test_output_carries_the_name_of_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # the environment of the tests may have it
    script = write_script(tmp_path, "print('out', sys.argv[1:]); print('err', place.rank, file=sys.stderr)")

    result = launch(script, args=["--lr", "0.1", "--help"], num_workers=3, num_servers=2, quiet=False)

    assert result.code == 0
    lines = result.stdout.splitlines()
    expected = [f"[worker {rank}] out ['--lr', '0.1', '--help']" for rank in range(3)]
    assert sorted(lines) == sorted([*expected, "[server 0] listening", "[server 1] listening"])
    assert {"[worker 0] err 0", "[worker 1] err 1", "[worker 2] err 2"} <= set(result.stderr.splitlines())
    assert "OMP_NUM_THREADS" in result.stderr


def test_the_script_is_main_and_finds_what_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("WORD = 'found'\n")
    script = write_script(tmp_path, "import beside; print(__name__, beside.WORD, sys.argv[0] == __file__, end='')")

    result = launch(script, num_workers=1)

    assert "[worker 0] __main__ found True" in result.stdout.splitlines()


def test_workers_learn_addresses_and_ranks(tmp_path: Path) -> None:
    script = write_script(
        tmp_path, "print(spec.addresses, place.rank, place.local_rank, place.incarnation, spec.num_workers)"
    )

    result = launch(script, num_workers=2, num_servers=2)

    assert "[worker 1] ('fake://0', 'fake://1') 1 1 0 2" in result.stdout


@pytest.mark.parametrize("ending", ["", "sys.exit(0)", "sys.exit()"])
def test_a_script_that_never_joins_is_told_once(tmp_path: Path, ending: str) -> None:
    result = launch(write_script(tmp_path, ending), num_workers=3)

    told = [line for line in result.stderr.splitlines() if "has never joined the job" in line]
    assert [line.partition(" the script")[0] for line in told] == ["[worker 0] paceline:"]
    assert "unless other workers have, each of the 3 has run all of it for itself" in told[0]


@pytest.mark.parametrize(("ending", "num_workers"), [("", 1), ("sys.exit(143)", 2), ("when_script_ends(print)", 2)])
def test_a_script_that_runs_once_has_joined_or_was_told_to_leave_is_not_told_to_join(
    tmp_path: Path, ending: str, num_workers: int
) -> None:
    joins = "from paceline.launch.script_exit import when_script_ends\n"
    result = launch(write_script(tmp_path, joins + ending), num_workers=num_workers)

    assert "has never joined the job" not in result.stderr


def test_what_is_kept_and_what_is_not(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    script = write_script(
        tmp_path,
        """
from pathlib import Path
from paceline.job.spec import read_token
token = read_token(Path(spec.run_dir))
seen = Path("/proc/self/environ").read_bytes() + Path("/proc/self/cmdline").read_bytes()
print(len(token), token in seen, token.hex().encode() in seen)
""",
    )

    result = launch(script, num_workers=1, num_servers=2, run_dir=str(run_dir))

    assert result.code == 0, result.stderr
    assert "[worker 0] 32 False False" in result.stdout
    assert {path.name for path in run_dir.iterdir()} == {"spec.json", "cluster.json", "trace", "told-0", "told-1"}
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    assert stat.S_IMODE((run_dir / "cluster.json").stat().st_mode) == 0o600
    assert json.loads((run_dir / "cluster.json").read_text())["addresses"] == ["fake://0", "fake://1"]
    assert (run_dir / "told-1").read_text() == "ended 0 0\nstop\n"


def test_a_temporary_run_directory_is_removed(tmp_path: Path) -> None:
    result = launch(write_script(tmp_path, "print('dir', spec.run_dir)"), num_workers=1)

    [line] = [line for line in result.stdout.splitlines() if "dir" in line]
    assert not Path(line.split()[-1]).exists()


@pytest.mark.parametrize(("statement", "code"), [("sys.exit(3)", 3), ("raise ValueError('boom')", 1)])
def test_a_failing_worker_stops_the_run_with_its_code_and_last_lines(tmp_path: Path, statement: str, code: int) -> None:
    script = write_script(
        tmp_path,
        f"""
if place.rank == 0: {PAUSE}
for number in range(30): print('line', number, file=sys.stderr)
{statement}
""",
    )

    result = launch(script)

    assert result.code == code
    assert result.stderr.count("line 29") == 1, "what is on the screen is not told twice"
    last = result.stderr.splitlines()[-1]
    assert re.fullmatch(rf"paceline: worker 1 \(pid \d+\) ended with exit code {code}; the run stops", last)


def test_last_lines_that_others_have_pushed_off_the_screen_are_told_again(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console()
    for number in range(20):
        console.relay("worker 1", 1, f"line {number}", to_stderr=True)
    words = [f"line {number}" for number in range(20)]
    console.quote("worker 1", words)
    assert "the last" not in capsys.readouterr().err
    for _ in range(SCREEN_LINES):
        console.relay("worker 0", 0, "another", to_stderr=True)
    console.quote("worker 1", words)
    quoted = [line for line in capsys.readouterr().err.splitlines() if line.startswith("    ")]
    assert quoted == [f"    {word}" for word in words]
    for _ in range(SCREEN_LINES):
        console.relay("worker 0", 0, "another", to_stderr=True)
    console.quote("worker 1", words[:1])
    assert "paceline: the last line that worker 1 wrote to stderr:\n    line 0\n" in capsys.readouterr().err


def test_why_a_run_stops_is_told_again_when_it_is_off_the_screen(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        f"""
gate = os.path.join(spec.run_dir, "gate")
def fill_screen(*_):
    for _ in range({SCREEN_LINES}): print('line', file=sys.stderr)
    sys.exit()
if place.rank == 0:
    signal.signal(signal.SIGTERM, fill_screen)
    os.mkfifo(gate)
    open(gate, "w").close()
    while True: signal.pause()
while not os.path.exists(gate): pass
open(gate).close()
sys.exit(3)
""",
    )

    result = launch(script)

    assert result.code == 3
    assert result.stderr.splitlines()[-1] == "paceline: worker 1 ended with exit code 3; the run was stopped"


def test_a_failing_worker_may_be_left_out(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    script = write_script(tmp_path, "sys.exit(3) if place.rank == 1 else print('done')")

    result = launch(script, crash_policy={"on_error": "continue"}, run_dir=str(run_dir))

    assert result.code == EXIT_LOST
    assert "[worker 0] done" in result.stdout
    assert "ended with exit code 3; the others go on without it" in result.stderr
    assert orders(run_dir) == ["ended 0 0", "ended 1 0", "stop"]


def orders(run_dir: Path, rank: int = 0) -> list[str]:
    """What a server was told; the workers may end in any order."""
    return sorted((run_dir / f"told-{rank}").read_text().splitlines())


CRASH = "if place.rank == 1: os.kill(os.getpid(), signal.SIGKILL)\nprint('done')\n"


def test_a_crashed_worker_is_told_to_all_servers_and_the_others_go_on(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"

    result = launch(write_script(tmp_path, CRASH), num_servers=2, run_dir=str(run_dir))

    assert result.code == EXIT_LOST
    assert result.stdout.count("done") == 1
    [alone] = (line for line in result.stderr.splitlines() if line.startswith("[worker"))
    assert alone.startswith("[worker 0] paceline: the script has ended and has never joined the job")
    told, last = (line for line in result.stderr.splitlines() if line != alone)
    assert re.fullmatch(r"paceline: worker 1 \(pid \d+\) was killed by SIGKILL; the others go on without it", told)
    without = r"paceline: the run has ended without worker 1, which was killed by SIGKILL at [\d:]{8} \(exit code 75\)"
    assert re.fullmatch(without, last)
    [exit] = read_run(run_dir).exits
    assert (exit.name, exit.exit_code, exit.then) == ("worker 1", -9, "the others go on without it")
    assert exit.pid == int(re.findall(r"pid (\d+)", told)[0])
    assert [orders(run_dir, rank) for rank in (0, 1)] == [["ended 0 0", "ended 1 0", "stop"]] * 2


def test_a_crash_may_stop_the_run(tmp_path: Path) -> None:
    result = launch(write_script(tmp_path, CRASH.replace("print('done')", PAUSE)), crash_policy={"on_crash": "stop"})

    assert result.code == 137
    assert re.search(r"worker 1 \(pid \d+\) was killed by SIGKILL; the run stops\n", result.stderr)


@pytest.mark.parametrize(("on_crash", "then"), [("continue", ""), ("restart", "restart 1 of 1 in 0.5 s, and ")])
def test_a_crash_is_told_with_what_it_means_to_a_strategy_that_needs_every_worker(
    tmp_path: Path, on_crash: str, then: str
) -> None:
    crash_policy = {"on_crash": on_crash, "max_restarts": 1}

    result = launch(write_script(tmp_path, CRASH), crash_policy=crash_policy, strategy="all-reduce")

    told = f"was killed by SIGKILL; {then}the next step of the others fails, as all-reduce needs every worker\n"
    assert result.stderr.count(told) == 1


def test_a_crashed_worker_may_be_started_again(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    crash = CRASH.replace("place.rank == 1", "place.rank == 1 and place.incarnation < 2")
    script = write_script(tmp_path, crash.replace("'done'", "'done as', place.incarnation"))

    result = launch(script, crash_policy={"on_crash": "restart"}, run_dir=str(run_dir))

    assert result.code == 0
    assert "[worker 1] done as 2" in result.stdout
    assert orders(run_dir) == ["ended 0 0", "ended 1 0", "ended 1 1", "ended 1 2", "stop"]
    assert "was killed by SIGKILL; restart 1 of 3 in 0.5 s" in result.stderr
    assert "was killed by SIGKILL; restart 2 of 3 in 1 s" in result.stderr


def test_restarts_come_to_an_end(tmp_path: Path) -> None:
    script = write_script(tmp_path, "print('try', place.incarnation)\n" + CRASH.replace("print('done')", PAUSE))

    result = launch(script, crash_policy={"on_crash": "restart", "max_restarts": 1})

    assert result.code == 137
    assert result.stdout.count("[worker 1] try") == 2
    assert "was killed by SIGKILL; the run stops after restart 1 of 1" in result.stderr


def test_a_run_without_any_worker_left_has_failed(tmp_path: Path) -> None:
    result = launch(write_script(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)"))

    assert result.code == 137
    assert result.stderr.count("no worker is left, and the run ends") == 1
    assert "no worker was left" not in result.stderr, "it is told once"


def test_a_server_that_cannot_start_ends_the_run(tmp_path: Path) -> None:
    result = launch(write_script(tmp_path, PAUSE), num_servers=2, behaviour="fail-at-start")

    assert result.code == 1
    assert "[server 1] no room for the parameters" in result.stderr.splitlines()
    assert re.search(r"server 1 \(pid \d+\) ended with exit code 7; the run ends", result.stderr)


def test_a_server_that_dies_ends_the_run(tmp_path: Path) -> None:
    crash = CRASH.replace("print('done')", PAUSE)

    result = launch(write_script(tmp_path, crash), behaviour="die-when-told", saving_s=0.2, grace_s=0.1)

    assert result.code == 1
    assert re.search(r"server 0 \(pid \d+\) was killed by SIGABRT; the run ends", result.stderr)
    assert "worker 0 had not ended 0.2 s after a server was lost, and was killed" in result.stderr


def test_workers_are_told_which_server_died_and_may_save_what_they_hold(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
from paceline.job.addresses import how_server_ended
if place.rank == 1: os.abort()  # of which the server is told, and dies
while not how_server_ended(Path(spec.run_dir), 0): pass
print("saved, as server 0", how_server_ended(Path(spec.run_dir), 0))
""".replace("Path(", "__import__('pathlib').Path("),
    )

    result = launch(script, behaviour="die-when-told", grace_s=0.1)

    assert result.code == 1
    assert "saved, as server 0 was killed by SIGABRT" in result.stdout
    assert "had not ended" not in result.stderr


def test_a_server_that_never_listens_ends_the_run(tmp_path: Path) -> None:
    result = launch(write_script(tmp_path, PAUSE), behaviour="silent", start_timeout_s=0.5)

    assert result.code == 1
    assert "server 0 did not say where it listens within 0.5 s (missing: server 0)" in result.stderr


def test_a_server_that_does_not_stop_is_killed(tmp_path: Path) -> None:
    result = launch(write_script(tmp_path, ""), behaviour="stubborn", grace_s=0.2)

    assert result.code == 1
    assert "server 0 had not ended 0.2 s after it was told to, and was killed" in result.stderr


def test_a_worker_that_does_not_stop_is_killed(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
gate = os.path.join(spec.run_dir, "gate")
if place.rank == 0:
    os.mkfifo(gate)
    open(gate, "w").close()
    while True: signal.sigtimedwait([], 0.05)
while not os.path.exists(gate): pass
open(gate).close()
sys.exit(4)
""",
    )

    result = launch(script, grace_s=0.2)

    assert result.code == 4
    assert "worker 0 had not ended 0.2 s after it was told to, and was killed" in result.stderr


def test_a_worker_that_would_finish_its_step_ends_at_once_with_a_run_that_failed(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
from pathlib import Path
from paceline.launch.signals import ABORT_MARKER_NAME, PreemptionNotice
gate = os.path.join(spec.run_dir, "gate")
if place.rank == 0:
    notice = PreemptionNotice(Path(spec.run_dir) / ABORT_MARKER_NAME)
    notice.listen()
    os.mkfifo(gate)
    open(gate, "w").close()
    while True: signal.sigtimedwait([], 0.05)
while not os.path.exists(gate): pass
open(gate).close()
sys.exit(4)
""",
    )

    result = launch(script, grace_s=TIMEOUT_S)

    assert result.code == 4
    assert re.search(r"worker 1 \(pid \d+\) ended with exit code 4; the run stops", result.stderr)


def test_what_a_worker_started_ends_with_it(tmp_path: Path) -> None:
    script = write_script(tmp_path, "subprocess.Popen(['sleep', '1000']); print('done')")

    result = launch(script, num_workers=1)  # returns at all only because the sleeper, which holds the pipes, is gone

    assert result.code == 0
    assert "done" in result.stdout


def test_in_one_process_the_job_is_one_child(tmp_path: Path) -> None:
    result = launch(write_script(tmp_path, "print('hello')"), num_workers=3, transport="memory")

    assert (result.code, result.stdout) == (0, "[workers 0-2] hello\n")


def test_a_run_outlives_the_reader_of_its_output(tmp_path: Path) -> None:
    script = write_script(tmp_path, "for number in range(1000): print(number)\nopen('done', 'w').close()")
    process = subprocess.Popen(
        command(script, {"num_workers": 1}), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=tmp_path
    )
    assert process.stdout is not None
    process.stdout.close()

    assert process.wait(120) == 0
    assert (tmp_path / "done").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_workers": 0}, "--workers must be at least 1, got 0"),
        ({"num_servers": -1}, "--servers must be at least 1, got -1"),
        ({"num_data_servers": -1}, "--data-servers must be at least 0, got -1"),
        ({"transport": "memory", "num_data_servers": 2}, "one process, where paceline.feed reads by itself"),
        ({"crash_policy": CrashPolicy(max_restarts=-1)}, "--max-restarts must be at least 0, got -1"),
        ({"transport": "memory", "crash_policy": CrashPolicy(on_crash="restart")}, "one process; choose shm or tcp"),
        ({"script": Path("/nowhere/train.py")}, "there is no script /nowhere/train.py"),
        ({"script": Path("/tmp")}, "/tmp is a folder, not a script"),
    ],
)
def test_a_run_that_makes_no_sense_is_refused(tmp_path: Path, settings: dict[str, object], message: str) -> None:
    script = write_script(tmp_path, "")

    with pytest.raises(UsageError, match=message):
        run_local(LocalRun(**{"script": script, **settings}), PROGRAMS)  # type: ignore[arg-type]


def test_a_run_directory_with_something_in_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not empty"):
        run_local(LocalRun(script=write_script(tmp_path, ""), run_dir=tmp_path), PROGRAMS)


def test_a_run_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted, link = tmp_path / "planted", tmp_path / "link"
    planted.mkdir()
    link.symlink_to(planted)
    monkeypatch.setattr("paceline.job.folders.os.geteuid", lambda: 12345)
    for folder in (planted, link):
        with pytest.raises(UsageError, match=f"{folder} is of user {planted.stat().st_uid}, expected 12345"):
            prepare_run_dir(folder)


def test_a_run_directory_is_private_before_it_is_looked_into(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o777)
    assert stat.S_IMODE(prepare_run_dir(shared).stat().st_mode) == 0o700


@pytest.mark.parametrize(("mode", "stranger"), [(0o644, False), (0o660, False), (0o600, True)])
def test_a_token_that_others_may_read_or_have_planted_is_refused(
    mode: int, stranger: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o755)
    write_token(tmp_path)
    assert len(read_token(tmp_path)) == 32
    found = SimpleNamespace(st_mode=stat.S_IFREG | mode, st_uid=os.geteuid() + stranger)
    expected = f"has mode {mode:04o} and owner {found.st_uid}, expected 0600 and"
    with monkeypatch.context() as patch:
        patch.setattr("paceline.job.spec.os.fstat", lambda _: found)
        with pytest.raises(UsageError, match=expected):
            read_token(tmp_path)


def test_similar_scripts_are_suggested(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()

    with pytest.raises(UsageError, match=r"did you mean .*/train\.py\?"):
        run_local(LocalRun(script=tmp_path / "trian.py"), PROGRAMS)


def test_progress_is_shown_beside_the_output(tmp_path: Path) -> None:
    step = """
import json, time
from pathlib import Path
from paceline.observe.trace import Step, Trace
trace = Trace(Path(spec.run_dir) / "trace" / f"worker-{place.rank}.jsonl")
trace.record(Step(t=time.monotonic(), worker=0, clock=4, samples=8, loss=0.5, wait_s=0.0, step_s=1.0))
trace.close()
print('stepped')
"""

    result = launch(write_script(tmp_path, step), num_workers=1, quiet=False, progress=True)

    assert result.code == 0, result.stderr
    assert "[worker 0] stepped" in result.stdout
    assert "0.5" in result.stderr
