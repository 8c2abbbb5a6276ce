"""The text in which a strategy is chosen, and the replicas that it leaves room for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.job.strategy import Distribution

DATA = ["parameter-server", "bsp", "ssp:3", "essp:0", "asynchronous", "backup:1", "all-reduce", "fsdp", "diloco:50"]


@given(st.none() | st.sampled_from(DATA), st.integers(1, 8), st.integers(1, 8), st.integers(1, 8))
def test_text_and_value_are_inverse(data: str | None, pipeline: int, tensor: int, shards: int) -> None:
    shards = 1 if data == "fsdp" else shards
    words = [data] * (data is not None) + [f"pipeline:{pipeline}", f"tensor:{tensor}", f"fsdp:{shards}"]
    read = Distribution.parse(" + ".join(words).upper())
    assert (read.pipeline, read.tensor, read.shards) == (pipeline, tensor, shards)
    assert (read.data is None) == (data is None)
    assert Distribution.parse(str(read)) == (
        read if str(read) != "parameter-server" else Distribution("parameter-server")
    )


def test_steps_between_exchanges_have_defaults() -> None:
    steps = [Distribution.parse(text).steps for text in ("local-sgd", "diloco", "downpour", "diloco:7", "all-reduce")]
    assert steps == [10, 50, 1, 7, 0]


def test_a_consistency_means_the_parameter_server() -> None:
    assert Distribution.parse("ssp:3") == Distribution("parameter-server", consistency="ssp:3")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ring", "'ring' is not known"),
        ("all-reduce:2", "'all-reduce:2' is not known"),
        ("pipeline", "pipeline needs a number of 1 or more"),
        ("tensor:0", "tensor needs a number of 1 or more"),
        ("diloco:often", "diloco needs a number of 1 or more"),
        ("ssp:3+all-reduce", "'all-reduce' says again"),
        ("pipeline:2+pipeline:4", "'pipeline:4' says again"),
        ("fsdp:2+bsp+fsdp:4", "'fsdp:4' says again"),
        ("fsdp+fsdp:2", "fsdp:2 says again .* as in all-reduce\\+fsdp:2"),
        ("fsdp:0", "fsdp needs a number of 1 or more"),
        ("ssp", "lacks its number"),
        ("", "'' is not known"),
    ],
)
def test_what_makes_no_sense_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Distribution.parse(text)


def test_workers_divide_into_replicas() -> None:
    wanted = Distribution.parse("all-reduce+pipeline:2+tensor:2")
    assert wanted.num_replicas(8) == 2
    with pytest.raises(UsageError, match="6 workers do not divide by that: take -n 4"):
        wanted.num_replicas(6)
    wanted = Distribution.parse("all-reduce+fsdp:2+tensor:2")
    assert wanted.num_replicas(8) == 4
    with pytest.raises(UsageError, match="4 workers keep a model in slices, and 6 workers do not divide"):
        wanted.num_replicas(6)


@pytest.mark.parametrize(
    ("strategy", "num_workers", "needs_all"),
    [
        ("all-reduce", 2, True),
        ("fsdp", 4, True),
        ("pipeline:2+tensor:2", 4, True),
        ("bsp+fsdp:2", 2, True),
        ("ssp:1+pipeline:2", 4, False),
        ("all-reduce", 1, False),
        ("bsp", 2, False),
        ("diloco", 2, False),
    ],
)
def test_some_strategies_need_every_worker(strategy: str, num_workers: int, *, needs_all: bool) -> None:
    assert Distribution.parse(strategy).needs_all(num_workers) is needs_all


def test_servers_have_something_to_do_unless_workers_combine_gradients_themselves() -> None:
    busy = [text for text in (*DATA, "pipeline:2") if Distribution.parse(text).needs_servers]
    assert busy == ["parameter-server", "bsp", "ssp:3", "essp:0", "asynchronous", "backup:1", "diloco:50", "pipeline:2"]
