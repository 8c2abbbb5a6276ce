"""`paceline serve` as a process: what it prints, and what is left when it is told to end, or killed."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tests.leaks import nothing_left_behind
from tests.serve.daemon import daemon

import paceline
from paceline.api.session import Session
from paceline.cli import answer
from paceline.errors import CheckpointError, Refused, UsageError
from paceline.serve.state import NamespaceFolder
from paceline.snapshots.folder import newest
from paceline.snapshots.reading import SavedDense
from paceline.worker.table import Table

DEADLINE_S = 200.0


@contextmanager
def serving(state: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server as its own process, and the address that it prints."""
    listen = () if "--listen" in options else ("--listen", "127.0.0.1:0")
    command = (sys.executable, "-m", "paceline", "serve", *listen, "--state", str(state), *options)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("paceline: serving at 127.0.0.1:"), process.communicate()
        yield process, line
    finally:
        process.kill()
        process.communicate()


def address_in(line: str, name: str) -> str:
    return "paceline://" + line.split("serving at ")[1].split(" ")[0] + f"/{name}"


def open_sum(ps: Session) -> Table:
    return ps.table("sum", shape=(2,), update=paceline.update.Add(), scale="sum")


def add_one(ps: Session, table: Table) -> float:
    table.push(torch.ones(2))
    ps.clock()
    return float(table.pull()[0])


def wait_saved(state: Path, value: float) -> None:
    """Wait until the newest snapshot of the namespace holds this value."""
    give_up, pause = time.monotonic() + DEADLINE_S, threading.Event()
    folder = state / "namespaces" / "job"
    while time.monotonic() < give_up:
        if _value_in(folder) == value:
            return
        pause.wait(0.05)
    raise AssertionError(f"{value} was never saved")


def _value_in(folder: Path) -> float | None:
    try:
        found = newest(folder)
        table = found.table("sum")
        assert table is not None
        [(_, values)] = SavedDense(found.folder, table).values()
        return float(values[0])
    except (UsageError, CheckpointError):  # there is none, or a newer one by now
        return None


def test_a_server_that_is_killed_loses_one_interval_and_one_that_is_told_to_end_nothing(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with serving(state, "--snapshot-every", "0.3", "--alone") as (process, line):
        ps = paceline.connect(address_in(line, "job"), token=state / "token")
        assert f'token="{state}/token"' in line
        table = open_sum(ps)
        assert [add_one(ps, table) for _ in range(3)] == [1.0, 2.0, 3.0]
        wait_saved(state, 3.0)
        kept = add_one(ps, table)  # perhaps saved before the end, perhaps not
        os.kill(process.pid, signal.SIGKILL)
        process.wait(DEADLINE_S)
        ps.close(politely=False)
    with serving(state, "--snapshot-every", "1000", "--alone") as (process, line):
        assert "with job from" in line
        with paceline.connect(address_in(line, "job"), token=state / "token") as ps:
            table = open_sum(ps)
            found = float(table.pull()[0])
            assert found in (3.0, kept)
            assert add_one(ps, table) == found + 1.0
            process.send_signal(signal.SIGTERM)  # with the client still there
            stdout, stderr = process.communicate(timeout=DEADLINE_S)
            assert (process.returncode, stdout, stderr) == (0, "", "paceline: saving, and ending\n")
            ps.close(politely=False)
    wait_saved(state, found + 1.0)
    with daemon(state) as served, served.connect("job") as ps:
        assert float(open_sum(ps).pull()[0]) == found + 1.0


def test_what_cannot_be_served_is_told_and_nothing_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refusal(*options: str, state: Path = tmp_path / "other") -> str:
        assert answer(["serve", "--state", str(state), *options]) != 0
        return capsys.readouterr().err

    with daemon(tmp_path / "state") as served, nothing_left_behind():
        taken = f"127.0.0.1:{served.port}"
        assert f"port {served.port} of 127.0.0.1 is taken by process {os.getpid()}" in refusal("--listen", taken)
        assert "another server keeps its state in" in refusal(state=served.state)
        assert "paceline keys make KEYS" in refusal("--listen", "0.0.0.0:0")
        assert "is not HOST:PORT" in refusal("--listen", "7700")
        assert "cannot read the job's token" in refusal("--keys", str(tmp_path / "nowhere"))
        assert "--snapshot-every is '0', expected auto, or a time such as" in refusal("--snapshot-every", "0")
        assert "--snapshot-every is 'nan', expected" in refusal("--snapshot-every", "nan")
        assert "--allow is 'rules', expected a rule or function of yours" in refusal("--allow", "rules")
        assert "is not a text in the encoding of this process" in refusal(state=tmp_path / os.fsdecode(b"\xff"))


def test_limits_of_the_shell_that_let_no_process_serve_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known, too_little = resource.getrlimit, 400 << 20
    monkeypatch.setattr(
        resource, "getrlimit", lambda one: (too_little, too_little) if one == resource.RLIMIT_AS else known(one)
    )
    assert answer(["serve", "--state", str(tmp_path / "state"), "--listen", "127.0.0.1:0"]) == 2
    assert f"`ulimit -v` allows each process {too_little} bytes" in capsys.readouterr().err


def test_a_damaged_namespace_is_told_and_the_others_are_served(tmp_path: Path) -> None:
    folder = NamespaceFolder(tmp_path / "state" / "namespaces" / "broken")
    folder.start_generation()
    (folder.path / "snapshot-1").mkdir()
    (tmp_path / "state").chmod(0o700)
    with serving(tmp_path / "state", "--alone") as (process, line):
        with pytest.raises(Refused, match=r"namespace 'broken': the snapshot .*snapshot-1 cannot be read"):
            paceline.connect(address_in(line, "broken"), token=tmp_path / "state" / "token")
        with paceline.connect(address_in(line, "sound"), token=tmp_path / "state" / "token") as ps:
            assert add_one(ps, open_sum(ps)) == 1.0
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=DEADLINE_S)
    assert stderr.startswith("paceline: namespace 'broken' is not served, its clients are refused: the snapshot ")


def test_a_full_disk_loses_nothing_and_the_exit_code_tells(tmp_path: Path) -> None:
    state, limit = tmp_path / "state", resource.RLIMIT_FSIZE

    def open_wide(ps: Session) -> Table:
        return ps.table("wide", shape=(1 << 16,), update=paceline.update.Add(), scale="sum")

    def push(ps: Session, table: Table) -> float:
        table.push(torch.ones(1 << 16))
        ps.clock()
        return float(table.pull()[-1])

    with serving(state, "--snapshot-every", "0.1", "--alone") as (process, line):
        resource.prlimit(process.pid, limit, (1 << 16, resource.RLIM_INFINITY))
        with paceline.connect(address_in(line, "job"), token=state / "token") as ps:
            table = open_wide(ps)
            assert push(ps, table) == 1.0
            assert process.stderr is not None
            assert "namespace 'job' could not be saved, no snapshot of it is there" in process.stderr.readline()
            assert push(ps, table) == 2.0
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=DEADLINE_S)
            assert process.returncode == 1
            ps.close(politely=False)
    with serving(state, "--snapshot-every", "0.1", "--alone") as (process, line):
        resource.prlimit(process.pid, limit, (1 << 16, resource.RLIM_INFINITY))
        with paceline.connect(address_in(line, "job"), token=state / "token") as ps:
            table = open_wide(ps)
            assert push(ps, table) == 1.0
            assert process.stderr is not None
            assert "could not be saved" in process.stderr.readline()
            resource.prlimit(process.pid, limit, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            assert push(ps, table) == 2.0
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0
    with serving(state, "--alone") as (_, line), paceline.connect(address_in(line, "job"), token=state / "token") as ps:
        assert push(ps, open_wide(ps)) == 3.0


def test_prometheus_scrapes_each_namespace(tmp_path: Path) -> None:
    with serving(tmp_path, "--metrics", "0") as (process, line):
        assert process.stderr is not None
        url = process.stderr.readline().split(" at ")[1].strip()
        with paceline.connect(address_in(line, "job"), token=tmp_path / "token") as ps:
            assert add_one(ps, open_sum(ps)) == 1.0
            with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
                text = answer.read().decode()
    assert 'paceline_server_updates_total{server="0",table="sum",namespace="job"} 1\n' in text
    assert 'paceline_membership_changes_total{event="joined",namespace="job"} 1\n' in text
