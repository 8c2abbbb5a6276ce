"""Which cores each process of a job is left, and with how many threads servers use theirs."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.launch.launching import launch, write_script

from paceline.core.consistency import Consistency, asynchronous, backup, bsp, essp, ssp
from paceline.errors import UsageError
from paceline.job.machines import cores_here, server_threads, share_of
from paceline.launch.plan import LocalRun

CORES = st.sets(st.integers(0, 255), min_size=1, max_size=40).map(sorted)


@given(CORES, st.integers(1, 12))
@example(list(range(8)), 3)
def test_shares_are_equal_neighbours_and_apart_while_cores_suffice(cores: list[int], count: int) -> None:
    shares = [share_of(cores, index, count) for index in range(count)]

    assert {len(share) for share in shares} == {max(1, len(cores) // count)}
    for share in shares:
        first = cores.index(share[0])
        assert list(share) == cores[first : first + len(share)]
    used = [core for share in shares for core in share]
    if count <= len(cores):
        assert len(set(used)) == len(used)
    else:
        times = [used.count(core) for core in cores]
        assert max(times) - min(times) <= 1


@given(st.integers(1, 256), st.integers(1, 16), st.integers(1, 64))
def test_servers_use_what_workers_leave_and_in_lockstep_the_machine(cores: int, servers: int, workers: int) -> None:
    threads = server_threads(asynchronous(), cores, servers, workers)
    assert threads >= 1
    assert threads == 1 or threads * servers + workers <= cores

    lockstep = server_threads(bsp(), cores, servers, workers)
    assert lockstep >= threads
    assert lockstep == 1 or lockstep * servers <= cores


@pytest.mark.parametrize(
    ("consistency", "lockstep"),
    [
        (bsp(), True),
        (ssp(0), False),  # its updates show on arrival
        (ssp(3), False),
        (essp(0), False),
        (essp(3), False),
        (asynchronous(), False),
        (backup(1), False),  # a late worker computes while the others' updates are applied
        (Consistency(0, "on_clock", "on_clock"), True),
        (Consistency(1, "on_clock"), False),
        (Consistency(None, "on_clock"), False),
    ],
    ids=str,
)
def test_only_without_slack_do_values_change_while_all_workers_wait(consistency: Consistency, lockstep: bool) -> None:
    assert consistency.lockstep is lockstep


@pytest.mark.parametrize("number", [0, -2])
def test_a_server_without_threads_is_refused(number: int) -> None:
    with pytest.raises(UsageError, match=f"--server-threads must be at least 1, got {number}"):
        LocalRun(script=Path("train.py"), server_threads=number).validate()


SCRIPT = """
import json, threading
found = []
thread = threading.Thread(target=lambda: found.append(sorted(os.sched_getaffinity(0))))
thread.start()
thread.join()
print(json.dumps([place.rank, sorted(os.sched_getaffinity(0)), found[0]]))
"""


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not bind processes to cores")
@pytest.mark.parametrize("pin", [True, False])
def test_pinned_workers_stay_on_cores_of_their_own(tmp_path: Path, pin: bool) -> None:
    num_workers = 3

    result = launch(write_script(tmp_path, SCRIPT), num_workers=num_workers, pin=pin)

    assert result.code == 0, result.stderr
    lines = [line.partition("] [") for line in result.stdout.splitlines() if "] [" in line]
    found = sorted(json.loads("[" + rest) for _, _, rest in lines)
    cores = cores_here()
    expected = [list(share_of(cores, rank, num_workers)) if pin else cores for rank in range(num_workers)]
    assert found == [[rank, share, share] for rank, share in enumerate(expected)]
