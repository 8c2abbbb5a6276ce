"""Servers are killed by SIGKILL in the middle of updates, of what they write down, and as they come up again."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.faults.running import run_to_end
from tests.faults.test_server_killed import GOES_ON, OUTLIVED, ended

NUM_DEATHS, NUM_CLOCKS = 90, 700  # of each server in the long search, which has 18 servers in 12 jobs


@contextmanager
def struck(folder: Path, num_deaths: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STRUCK", f"{folder / 'deaths'}:{num_deaths}")
        yield


def check(folder: Path, consistency: str, options: tuple[str, ...], num_deaths: int, num_clocks: int) -> None:
    """Every push counts once after so many deaths of each server, and under bsp the bytes are those of a calm run."""
    asked, options = (consistency, str(num_clocks)), ("-n", "2", *options)
    with struck(folder, num_deaths):
        code, run = run_to_end(folder / "struck", OUTLIVED, *asked, options=options)
    assert code == 0, run.output
    digests = ended(run)
    deaths = [path.read_bytes() for path in sorted(folder.glob("deaths-*"))]
    assert [len(each) for each in deaths] == [num_deaths] * (2 if "-m" in options else 1)
    assert len(run.saying(GOES_ON)) == sum(map(len, deaths))
    if consistency == "bsp":
        code, calm = run_to_end(folder / "calm", OUTLIVED, *asked, options=options)
        assert (code, ended(calm)) == (0, digests), calm.output


def test_servers_that_die_in_the_middle_of_what_they_do_lose_and_double_nothing(tmp_path: Path) -> None:
    check(tmp_path, "ssp:1", ("--transport", "tcp"), 6, 80)


@pytest.mark.campaign
@pytest.mark.parametrize("consistency", ["bsp", "ssp:2", "asynchronous"])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("servers", ["1", "2"])
def test_no_death_of_a_thousand_loses_or_doubles_a_push(
    consistency: str, transport: str, servers: str, tmp_path: Path
) -> None:
    options = ("--transport", transport, *(("-m", servers) if servers != "1" else ()))
    check(tmp_path, consistency, options, NUM_DEATHS, NUM_CLOCKS)
