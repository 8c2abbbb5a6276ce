"""Nothing survives the launcher, however it ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.launch.launching import TIMEOUT_S, launched, processes_of, read_until, wait_gone, write_script

from paceline.launch.signals import Signals

LEFT_WITHIN_S = 30.0

PAUSE = "print('ready', spec.run_dir, flush=True)\nwhile True: signal.sigtimedwait([], 0.05)\n"

FAMILY = """
subprocess.Popen([sys.executable, "-c",
    "import signal; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]; print('grandchild', flush=True); "
    "signal.pause()"])
"""


def run_dir_of(lines: list[str]) -> Path:
    return Path(lines[0].split()[-1])


def test_kill_9_of_the_launcher_leaves_nothing(tmp_path: Path) -> None:
    script = write_script(tmp_path, PAUSE.replace("while", FAMILY + "while"))
    with launched(script, num_workers=2, num_servers=2) as process:
        run_dir = run_dir_of(read_until(process, "ready", times=2))
        read_until(process, "grandchild")
        family = processes_of(run_dir)
        assert len(family) >= 6  # 2 servers, 2 workers, at least 1 grandchild, the guard

        process.kill()

        assert wait_gone(family, LEFT_WITHIN_S) == set()
        assert processes_of(run_dir) == set()
        assert not run_dir.exists()


def test_kill_9_keeps_only_the_harmless_files_of_a_kept_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with launched(write_script(tmp_path, PAUSE), run_dir=str(run_dir)) as process:
        read_until(process, "ready", times=2)
        family = processes_of(run_dir)

        process.kill()

        assert wait_gone(family, LEFT_WITHIN_S) == set()
        assert {path.name for path in run_dir.iterdir()} == {"spec.json", "cluster.json", "trace", "told-0"}


def test_workers_and_servers_end_even_when_the_guard_is_killed_too(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with launched(write_script(tmp_path, PAUSE), run_dir=str(run_dir)) as process:
        read_until(process, "ready", times=2)
        family = processes_of(run_dir)
        [guard] = [pid for pid in family if b"guard.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]

        os.kill(guard, signal.SIGKILL)
        wait_gone({guard}, LEFT_WITHIN_S)
        process.kill()

        assert wait_gone(family, LEFT_WITHIN_S) == set()


CAREFUL = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit("saved"))
try:
    print("ready", spec.run_dir, flush=True)
    # Not pause(): a signal that comes just before it would be answered only after the next one.
    while True: signal.sigtimedwait([], 0.05)
except KeyboardInterrupt:
    print("interrupted once", flush=True)
    sys.exit(0)
"""


@pytest.mark.parametrize(
    ("number", "code", "seen"),
    [
        (signal.SIGINT, 130, "interrupted once"),
        (signal.SIGTERM, 143, "saved"),
        (signal.SIGHUP, 129, "saved"),
    ],
)
def test_a_signal_reaches_every_worker_once_and_names_the_exit_code(
    tmp_path: Path, number: signal.Signals, code: int, seen: str
) -> None:
    with launched(write_script(tmp_path, CAREFUL)) as process:
        run_dir = run_dir_of(read_until(process, "ready", times=2))
        family = processes_of(run_dir)

        process.send_signal(number)
        output, _ = process.communicate(timeout=TIMEOUT_S)

    assert process.returncode == code
    assert output.count(seen) == 2
    assert f"paceline: stopped by {number.name}" in output
    assert wait_gone(family, 0) == set()
    assert not run_dir.exists()


def test_a_second_interrupt_kills_at_once(tmp_path: Path) -> None:
    stubborn = PAUSE.replace("while", "signal.signal(2, lambda *_: print('not yet', flush=True))\nprint('set')\nwhile")
    with launched(write_script(tmp_path, stubborn), grace_s=1000.0) as process:
        read_until(process, "set", times=2)
        process.send_signal(signal.SIGINT)
        read_until(process, "not yet", times=2)

        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=TIMEOUT_S)

    assert process.returncode == 130
    assert "interrupted again: killing what is left" in output


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGTERM)
            assert signals.pop_received() == [signal.SIGTERM]
            assert signals.pop_received() == []
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_child_ends_at_once_when_its_launcher_is_gone_before_it_started() -> None:
    code = "from paceline.launch.entry import die_with_launcher; die_with_launcher(); print('alive')"
    environment = {**os.environ, "PACELINE_LAUNCHER_PID": "1"}

    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)

    assert (result.returncode, result.stdout) == (137, "")
