"""Servers of their own on two hosts stand in for each other, for a client on a third one, while a line is cut."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from benchmarks.shaped_network import ShapedNetwork
from tests.hosts.test_nodes import PATIENCE_S, hosts, wait_for
from tests.serve.test_replicas import wait_told

from paceline.job.credentials.holders import Holder
from paceline.job.credentials.key_store import issue_keys, make_keys
from paceline.job.views import Views

CLIENT = Path(__file__).with_name("serve_client.py")


@contextmanager
def started(network: ShapedNetwork, host: int, *command: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        network.command(host, sys.executable, *command),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def server(network: ShapedNetwork, host: int, folder: Path, keys: Path, lag: int) -> tuple[str, ...]:
    where = ("--listen", f"{network.address(host)}:7700", "--state", str(folder / f"state-{host}"))
    views = ("--views", str(folder / "views"), "--lag", str(lag))
    return ("-m", "paceline", "serve", *where, "--keys", str(keys), *views, "--alone")


def add_one(client: subprocess.Popen[str]) -> float:
    ask(client)
    return answer(client)


def ask(client: subprocess.Popen[str]) -> None:
    assert client.stdin is not None
    client.stdin.write("\n")
    client.stdin.flush()


def answer(client: subprocess.Popen[str]) -> float:
    assert client.stdout is not None
    return float(client.stdout.readline())


@pytest.mark.campaign
@pytest.mark.parametrize("lag", [0, 2])
def test_a_client_goes_on_with_the_other_server_where_the_line_of_its_server_is_cut(lag: int, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    keys, carried = tmp_path / "keys", tmp_path / "carried"
    make_keys(keys)
    issue_keys(keys, Holder("server", 0), carried)
    with (
        hosts(3) as network,
        started(network, 0, *server(network, 0, tmp_path, keys, lag)) as first,
        started(network, 1, *server(network, 1, tmp_path, carried, lag)) as second,
    ):
        for process in (first, second):
            assert process.stdout is not None
            assert "serving at" in process.stdout.readline()
        address = f"paceline://{network.address(0)}:7700,{network.address(1)}:7700/job"
        with started(network, 2, str(CLIENT), address, str(keys)) as client:
            sums = [add_one(client)]
            wait_told(first, "namespace 'job' has a replica\n")
            sums.append(add_one(client))
            views = Views(tmp_path / "views" / "namespaces" / "job", 0)
            before = views.newest()
            network.cut(0)
            ask(client)
            wait_for([first, second], lambda: views.newest() != before)  # one of the two has decided to go on
            network.heal(0)
            sums.append(answer(client))
            view = views.newest()
            assert before is not None
            assert view is not None
            head, other = (first, second) if view.head == before.head else (second, first)
            wait_told(head, "namespace 'job' has a replica\n")
            sums.append(add_one(client))
            head.kill()
            head.wait(PATIENCE_S)
            sums.append(add_one(client))
            wait_told(other, "namespace 'job' is served by its replica from now on")
    assert sums == [1.0, 2.0, 3.0, 4.0, 5.0]
