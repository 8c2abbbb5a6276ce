"""What a loop cannot be fed, or not in this way, is told before anything is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.data.feeding_jobs import Training, fed, fed_job, write_numbers
from tests.jobs import run_job
from tests.training.recipes import mlp

import paceline
from paceline import sources
from paceline.api.session import Session
from paceline.errors import DataError, Refused, UsageError

OWN = "tests.data.sources.own"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0, expected a whole number from 1 to 1048576"),
        ({"batch_size": True}, "batch_size is True, expected a whole number from 1"),
        ({"batch_size": (1 << 20) + 1}, "batch_size is 1048577, expected a whole number from 1 to 1048576"),
        ({"seed": 1.0}, "seed is 1.0, expected a whole number from -4398046511104"),
        ({"seed": 1 << 60, "leases": False}, "expected a whole number from -4398046511104 to 4398046511104"),
        ({"slices": 7}, "slices is 7, expected a whole number from 1 to 6"),
        ({"slices": 2, "leases": False}, "slices=2 are parts of a batch that workers get one by one"),
        ({"prefetch": -1}, "prefetch is -1, expected a whole number from 0 to 32"),
        ({"shuffle": "no"}, "shuffle is 'no', expected True or False"),
        ({"transform": abs}, "transform is <built-in function abs>: name a function by its import path"),
        ({"on_error": "ignore"}, "on_error is 'ignore', expected \"raise\""),
        ({"transform": "nowhere:function"}, "nowhere"),
        ({"batch_size": 9, "drop_last": True}, "the source has 8 samples, fewer than a batch of 9"),
        ({"source": [1, 2]}, "cannot feed from a list: expected what a function of paceline.sources returns"),
        ({"source": sources.dataset(f"{OWN}:squares", num=0)}, "nothing to feed: the source has 0 samples"),
    ],
)
@pytest.mark.parametrize("data_servers", [0, 1])
def test_what_makes_no_sense_is_refused(
    data_servers: int, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    def work(_: Session) -> None:
        with pytest.raises(UsageError, match=message):
            fed(**{"source": write_numbers(tmp_path, 8), **options})()

    with fed_job(tmp_path, data_servers=data_servers) as started:
        started.run(work)


@pytest.mark.parametrize("data_servers", [0, 2])
def test_a_file_that_is_missing_is_named(data_servers: int, tmp_path: Path) -> None:
    def work(_: Session) -> None:
        with pytest.raises(DataError, match=r"nowhere\.npy"):
            paceline.feed(sources.arrays(tmp_path / "nowhere.npy"), batch_size=4)

    with fed_job(tmp_path, data_servers=data_servers) as started:
        started.run(work)


def test_leases_need_an_optimizer_that_can_add_up(tmp_path: Path) -> None:
    source = write_numbers(tmp_path, 12)

    def work(_: Session) -> None:
        loader = paceline.feed(source, batch_size=3)
        with pytest.raises(
            UsageError, match=r"slices or leased batches needs an optimizer .* Or give paceline.feed leases=False"
        ):
            next(iter(loader))
        model = mlp().double()
        combined = paceline.distributed(torch.optim.SGD(model.parameters(), lr=0.1), strategy="all-reduce", model=model)
        with pytest.raises(UsageError, match=r"does not go with all-reduce.* leases=False"):
            next(iter(loader))
        assert sum(1 for _ in paceline.feed(source, batch_size=3, leases=False)) == 4
        del combined

    run_job(tmp_path, work)


def test_rows_can_be_asked_for_ahead_where_batches_are_not_dealt(tmp_path: Path) -> None:
    source = write_numbers(tmp_path, 12)

    def work(_: Session) -> None:
        for leases in (False, True):
            loader = paceline.feed(source, batch_size=3, leases=leases)
            ahead = paceline.prefetch(loader, {})
            if leases:
                with pytest.raises(UsageError, match="known only when it is requested: give feed leases=False"):
                    next(iter(ahead))
            else:
                assert [len(batch["indices"]) for batch in ahead] == [3, 3, 3, 3]
            with torch.no_grad():
                assert len(list(ahead)) == 4

    run_job(tmp_path, work)


@pytest.mark.parametrize("options", [{"shuffle": True}, {"drop_last": True}, {"seed": 4}], ids=str)
def test_workers_that_are_fed_in_another_order_are_told(options: dict[str, Any], tmp_path: Path) -> None:
    source = write_numbers(tmp_path, 36)
    training = Training(lambda: fed(source, **(options if paceline.rank() else {}))())
    with (
        fed_job(tmp_path, workers=2) as started,
        pytest.raises(
            Refused, match=r"workers . and . do not cut the slices of loader 1 alike: .* drop last, shuffled"
        ),
    ):
        started.run(training)
