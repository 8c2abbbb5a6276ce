"""What is refused of a run on Ray before Ray has anything to do, and how news of a process are collected."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

import paceline
from paceline import cli
from paceline.errors import PeerError, UsageError
from paceline.launch.plan import LocalRun
from paceline.ray.actor import CHUNK_BYTES, FileFollower, NewsBuffer
from paceline.ray.engine import check_dashboard, check_reachable, prepare
from paceline.ray.messages import News
from paceline.ray.options import RayOptions

RUN = LocalRun(script=Path("jobs/train.py"))


def test_without_ray_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)

    with pytest.raises(UsageError, match=r"pip install 'paceline\[ray\]'"):
        prepare(RayOptions())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (RayOptions(address="ray://head:10001"), "expected auto or HOST:PORT"),
        (RayOptions(worker_cpus=0), "--worker-cpus must be more than 0"),
        (RayOptions(server_cpus=float("inf")), "--server-cpus must be more than 0, got inf"),
        (RayOptions(worker_gpus=-1), "--worker-gpus must be 0 or more"),
        (RayOptions(worker_gpus=float("nan")), "--worker-gpus must be 0 or more"),
        (RayOptions(start_timeout=0), "--start-timeout more than 0 s"),
        (RayOptions(env=("COLOUR",)), "expected NAME=VALUE"),
        *(
            (RayOptions(worker_resources=(text,)), f"--worker-resource is '{text}', expected NAME=AMOUNT")
            for text in ("TPU", "TPU=many", "TPU=nan", "TPU=-1")
        ),
        (RayOptions(working_dir=Path("elsewhere")), "must be a folder with the script"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_is_refused(options: RayOptions, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        options.validate(RUN)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"transport": "memory"}, "memory is one process, and Ray starts many"),
        ({"pin": True}, "--pin is for one machine"),
    ],
)
def test_what_is_for_one_machine_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        RayOptions().validate(LocalRun(script=RUN.script, **settings))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (RayOptions(replicas=2), "--replicas is 2, expected 1 for a replica of each server, or 0"),
        (RayOptions(lag=2), "--lag is 2: replicas may lag, and there are none. Add --replicas 1"),
        (RayOptions(replicas=1, lag=-1), "--lag is -1, expected a number of clocks from 0 to 9999"),
        (RayOptions(replicas=1, lag=1.5), r"--lag is 1\.5, expected a number"),  # pyright: ignore[reportArgumentType]
        (
            RayOptions(replicas=1, place_servers="strict-pack"),
            "--place-servers is strict-pack, and with --replicas each server is placed together with its replica",
        ),
    ],
)
def test_replicas_that_cannot_be_are_refused(options: RayOptions, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        options.validate(RUN)


def test_replicas_that_are_asked_for_as_under_other_launchers_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_SERVERS", "node:1+replicas:1+lag:3")
    assert RayOptions().with_environment() == RayOptions(replicas=1, lag=3)
    assert RayOptions(replicas=1).with_environment() == RayOptions(replicas=1)
    monkeypatch.setenv("PACELINE_SERVERS", "first:2")
    assert RayOptions().with_environment() == RayOptions()
    monkeypatch.setenv("PACELINE_SERVERS", "node:1+replicas:2")
    with pytest.raises(UsageError, match=r"servers is 'node:1\+replicas:2'"):
        RayOptions().with_environment()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"worker_resources": ["TPU"]}, r"worker_resources is \['TPU'\], expected a dict with an amount for each name"),
        ({"env": "A=1"}, "env is 'A=1', expected a dict with a text for each name"),
        ({"pip": "numpy"}, "pip is 'numpy', expected a list of texts"),
        ({"args": ["--lr", 0.1]}, "args is .*, expected a list of texts"),
        ({"worker_gpus": "1"}, "worker_gpus is '1', expected a number"),
    ],
)
def test_an_argument_of_another_type_is_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        paceline.ray.run("train.py", **given)  # type: ignore[arg-type]


def test_an_option_of_ray_needs_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.answer(["run", "--worker-gpus", "1", "--env", "A=1", __file__]) == cli.EXIT_USAGE

    assert "--worker-gpus is for --engine ray, and the engine is local" in capsys.readouterr().err


def test_a_dashboard_beyond_the_machine_needs_authentication() -> None:
    with pytest.raises(UsageError, match="RAY_AUTH_MODE=token"):
        check_dashboard("0.0.0.0", authenticates=False)
    check_dashboard("0.0.0.0", authenticates=True)
    check_dashboard("localhost", authenticates=False)


def test_a_cluster_that_does_not_answer_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        check_reachable(address)

    with pytest.raises(PeerError, match=f"no Ray cluster answers at {address}"):
        check_reachable(address)
    with pytest.raises(PeerError, match=r"no Ray cluster answers at head\.\.:6379"):
        check_reachable("head..:6379")


@pytest.mark.parametrize("address", ["head", "head:port", "head:70000", ":6379"])
def test_what_is_no_address_of_a_cluster_is_told_before_ray_is_asked(address: str) -> None:
    with pytest.raises(UsageError, match=f"neither auto nor HOST:PORT: '{address}' is not HOST:PORT"):
        check_reachable(address)


def test_the_script_is_found_from_the_folder_that_every_node_gets() -> None:
    assert RayOptions().script_there(RUN.script) == RUN.script.absolute()
    assert RayOptions(address="auto").script_there(RUN.script) == Path("train.py")
    assert RayOptions(working_dir=Path()).script_there(RUN.script) == RUN.script


def test_news_come_in_order_and_the_exit_code_with_all_that_was_before() -> None:
    outbox = NewsBuffer()
    outbox.relay("worker 0", 0, "one", to_stderr=False)
    outbox.relay("worker 0", 0, "two", to_stderr=True)
    outbox.add(trace=b"a\n")
    outbox.add(trace=b"b\n", exit_code=3)

    assert outbox.wait_news(1.0) == News([(False, "one"), (True, "two")], "", b"a\nb\n", 3)


def test_views_that_a_server_asks_for_are_told_once(tmp_path: Path) -> None:
    outbox, tail = NewsBuffer(), FileFollower(tmp_path, "server", 3, 1)
    (tmp_path / "server-3.address").write_text("tcp://127.0.0.1:7")  # of the process that serves
    (tmp_path / "server-3.1.address").write_text("tcp://127.0.0.1:8")
    (tmp_path / "server-3.asked-2").write_text("1 -1")
    (tmp_path / "server-30.asked-2").write_text("1 -1")

    assert tail.report(outbox)
    assert not tail.report(outbox)

    assert outbox.wait_news(1.0) == News([], "tcp://127.0.0.1:8", b"", None, [(2, 1, -1)])


def test_a_trace_is_told_in_whole_lines_to_its_end_though_its_folder_is_gone(tmp_path: Path) -> None:
    (tmp_path / "trace").mkdir()
    path = tmp_path / "trace" / "server-0.jsonl"
    line = b'{"kind": "applied"}\n' * (CHUNK_BYTES // 16)
    path.write_bytes(line + b'{"torn')
    (tmp_path / "server-0.address").write_text("tcp://127.0.0.1:7\n")
    outbox, tail = NewsBuffer(), FileFollower(tmp_path, "server", 0)

    assert tail.report(outbox)
    first = outbox.wait_news(1.0)
    path.unlink()
    tail.finish(outbox)

    assert first.address == "tcp://127.0.0.1:7"
    assert first.trace.endswith(b"\n")
    assert first.trace + outbox.wait_news(1.0).trace == line
