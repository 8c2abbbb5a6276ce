"""What `paceline run --listen` and `paceline join` are given, and what makes no sense."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline import cli
from paceline.errors import UsageError
from paceline.job.credentials.key_store import make_keys
from paceline.job.environment import Place
from paceline.job.machines import LOOPBACK
from paceline.launch.joining.options import ListenOptions
from paceline.launch.joining.run import JoinOrder, join_run
from paceline.launch.local import make_spec
from paceline.launch.plan import DEFAULT_PROGRAMS, LocalRun, plan_launches, plan_workers

KEYS = Path("keys")


def test_servers_listen_where_other_machines_reach_them_and_encrypt(tmp_path: Path) -> None:
    joining = ListenOptions(f"{LOOPBACK}:0", KEYS)
    run = LocalRun(script=Path("train.py"), num_workers=3, num_at_start=1, num_data_servers=1, joining=joining)
    run.validate()
    spec = make_spec(run, tmp_path)
    assert (spec.transport, spec.encrypted) == ("tcp", True)
    launches = {each.name: each for each in plan_launches(run, DEFAULT_PROGRAMS, tmp_path, {})}
    hosts = {name: launches[name].command[-1] for name in ("server 0", "data server 0")}
    assert hosts == {"server 0": LOOPBACK, "data server 0": LOOPBACK}


@pytest.mark.parametrize(
    ("options", "run", "says"),
    [
        (ListenOptions(keys=KEYS), {}, "--keys is for --listen"),
        (ListenOptions("127.0.0.1:0"), {"num_at_start": 1}, "needs certificates: make them with `paceline keys make"),
        (ListenOptions("127.0.0.1:0", KEYS), {}, "the number of workers is fixed: give a range, as --workers 2:8"),
        (
            ListenOptions("127.0.0.1:0", KEYS),
            {"num_at_start": 1, "transport": "memory"},
            "is one process; choose shm or tcp",
        ),
        (ListenOptions("127.0.0.1", KEYS), {"num_at_start": 1}, "is not HOST:PORT"),
        (ListenOptions("0.0.0.0:0", KEYS), {"num_at_start": 1}, "which is no address to connect to"),
        (ListenOptions("[::]:0", KEYS), {"num_at_start": 1}, "which is no address to connect to"),
    ],
)
def test_what_does_not_go_together_is_refused(options: ListenOptions, run: dict[str, int | str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        LocalRun(script=Path("train.py"), joining=options, **run).validate()  # pyright: ignore[reportArgumentType]


def test_keys_that_others_can_read_are_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_keys(tmp_path / "keys")
    (tmp_path / "keys" / "any.key").chmod(0o644)
    script = tmp_path / "train.py"
    script.touch()
    listen = ("--listen", "127.0.0.1:0", "--keys", str(tmp_path / "keys"))
    code = cli.answer(["run", "-n", "1:2", *listen, "--run-dir", str(tmp_path / "run"), str(script)])
    assert code == 2
    assert "any.key has mode 0644" in capsys.readouterr().err


def test_workers_are_planned_in_the_places_that_were_given() -> None:
    places = [Place(Path("cluster.json"), rank, number, 3) for number, rank in enumerate((2, 5))]
    run = LocalRun(script=Path("train.py"), args=("--lr", "1"), num_workers=8)
    planned = plan_workers(run, DEFAULT_PROGRAMS, {"A": "1"}, places)
    assert [(each.name, each.rank, each.place) for each in planned] == [
        ("worker 2", 2, places[0]),
        ("worker 5", 5, places[1]),
    ]
    assert {each.command[-3:] for each in planned} == {("train.py", "--lr", "1")}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["-n", "0", "."], "--workers must be at least 1, got 0"),
        (["."], "cannot read the cluster spec"),
        (["127.0.0.1:99999"], "is neither the folder of a run on this machine nor HOST:PORT"),
        (["127.0.0.1:1"], "give --keys FOLDER"),
        (["--keys", "none", "127.0.0.1:1"], "cannot read the job's token"),
    ],
)
def test_what_cannot_be_joined_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    assert cli.answer(["join", *words, "train.py"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert says in line
    assert line.startswith("paceline: ")


def test_a_script_that_is_not_there_is_said_first(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no script"):
        join_run(JoinOrder(address=str(tmp_path), script=tmp_path / "none.py"), DEFAULT_PROGRAMS)


def test_the_words_behind_the_script_are_its_own() -> None:
    program = (
        "import json, sys\n"
        "from unittest import mock\n"
        "from paceline import cli\n"
        "with mock.patch('paceline.launch.joining.run.join_run', return_value=0) as join:\n"
        "    cli.answer(sys.argv[1:])\n"
        "order = join.call_args.args[0]\n"
        "print(json.dumps([order.address, str(order.script), order.args, order.num_workers, order.any_script]))\n"
    )
    for words in (
        ["join", "run", "-n", "3", "--any-script", "train.py", "-n", "9", "--keys", "x"],
        ["join", "-n", "3", "--any-script", "run", "--", "train.py", "-n", "9", "--keys", "x"],
    ):
        done = subprocess.run(
            [sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=200, env={**os.environ}
        )
        assert json.loads(done.stdout) == ["run", "train.py", ["-n", "9", "--keys", "x"], 3, True], done.stderr
