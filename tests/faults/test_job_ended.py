"""A server, the launcher or the user ends the job: it ends soon, says why once, and leaves nothing."""

import os
import signal
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from tests.faults.running import LEFT_WITHIN_S, SCRIPTS, Run, running
from tests.launch.launching import wait_gone, wait_stopped

LEDGER = SCRIPTS / "ledger.py"
ENDLESS = ("ssp:2", "100000")


def listening_ports(run: Run) -> list[tuple[str, int]]:
    """Where the processes of the job accept connections over the network."""
    found: list[tuple[str, int]] = []
    for pid in run.family():
        with suppress(psutil.NoSuchProcess):  # one that helps to start others ends by itself
            entries = psutil.Process(pid).net_connections("inet")
            found += [tuple(entry.laddr) for entry in entries if entry.status == psutil.CONN_LISTEN]
    return found


def assert_nothing_left(run: Run, family: set[int], ports: list[tuple[str, int]], shared: set[str]) -> None:
    assert wait_gone(family, LEFT_WITHIN_S) == set()
    taken = {entry.laddr.port for entry in psutil.net_connections("inet") if entry.status == psutil.CONN_LISTEN}
    assert not taken & {port for _, port in ports}
    assert {name for name in os.listdir("/dev/shm") if "paceline" in name.lower()} <= shared
    assert not [path for path in run.run_dir.glob("**/*") if path.is_socket()]


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_kill_9_of_the_launcher_leaves_nothing(transport: str, tmp_path: Path) -> None:
    options = ("-n", "4" if transport == "tcp" else "1", "-m", "2", "--transport", transport)
    shared = set(os.listdir("/dev/shm"))
    with running(tmp_path / "run", LEDGER, *ENDLESS, options=options) as run:
        run.wait_for("begin", times=int(options[1]))
        family, ports = run.family(), listening_ports(run)
        assert {host for host, _ in ports} == ({"127.0.0.1"} if transport == "tcp" else set())
        assert len(ports) == (2 if transport == "tcp" else 0)

        run.process.kill()

        assert_nothing_left(run, family, ports, shared)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_launcher_ends_the_job(number: signal.Signals, code: int, tmp_path: Path) -> None:
    with running(tmp_path / "run", LEDGER, *ENDLESS, options=("-n", "2", "--grace-s", "1000")) as run:
        run.wait_for("begin", times=2)
        family = run.family()

        run.process.send_signal(number)

        assert run.end() == code
        assert run.told() == [f"paceline: stopped by {number.name}"]
        assert "Traceback" not in run.output
        assert_nothing_left(run, family, [], set())


def test_kill_9_of_a_server_ends_the_job_with_its_name(tmp_path: Path) -> None:
    options = ("-n", "2", "-m", "2", "--on-server-crash", "stop")
    with running(tmp_path / "run", LEDGER, *ENDLESS, options=options) as run:
        run.wait_for("begin", times=2)
        server = run.wait_for_server(1)

        os.kill(server, signal.SIGKILL)

        assert run.end() == 1
        assert run.told()[-1] == "paceline: server 1 was killed by SIGKILL; the run ends"


def test_a_worker_that_is_stopped_and_woken_goes_on(tmp_path: Path) -> None:
    with running(tmp_path / "run", LEDGER, "ssp:2", "40", "0:asleep", options=("-n", "2", "-m", "2")) as run:
        sleeper = int(run.wait_for("[worker 0] begin")[0].split()[-1])
        wait_stopped(sleeper)
        with pytest.raises(psutil.TimeoutExpired):  # the bound holds the other worker back
            run.process.wait(1.0)
        os.kill(sleeper, signal.SIGCONT)

        assert run.end() == 0, run.output
        assert len(run.saying("ledger 0 40")) == 2
