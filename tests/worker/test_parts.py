"""A table of named parts: one push, one update and one read for all of them, with the values of tables of their own."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.jobs import run_job

import paceline
from paceline.api.session import Session
from paceline.errors import Refused, UsageError

ADAM = paceline.update.Adam(lr=0.1)
SHAPES = {"weight": (3, 2), "bias": (5,), "scale": (), "none": (0, 4)}


@pytest.fixture
def ps() -> Iterator[Session]:
    with paceline.init() as session:
        yield session


def test_parts_have_the_bits_of_tables_of_their_own(ps: Session) -> None:
    torch.manual_seed(3)
    init = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    parts = ps.table("layer", shape=SHAPES, update=ADAM, init=init)
    tables = {name: ps.table(name, shape=shape, update=ADAM, init=init[name]) for name, shape in SHAPES.items()}
    for number in range(4):
        gradients = {name: torch.randn(shape) for name, shape in SHAPES.items() if number != 2 or name != "bias"}
        parts.push(gradients)
        for name, gradient in gradients.items():
            tables[name].push(gradient)
        ps.clock()
    found = parts.pull()
    assert list(found) == list(SHAPES) == list(parts.shapes)
    for name, table in tables.items():
        assert torch.equal(found[name], table.pull()), name
        assert found[name].shape == SHAPES[name]
    assert not torch.equal(found["bias"], init["bias"])


def test_numbers_of_any_kind_are_parts(ps: Session) -> None:
    shape = {"a": (2, 2), "b": (3,)}
    parts = ps.table("w", shape=shape, update=paceline.update.Add(), scale="sum", dtype="float64", init=1.0)
    parts.push({"b": [1, 2, 3], "a": torch.arange(4.0, requires_grad=True).view(2, 2).T})
    parts.push({"b": np.ones(3, dtype=np.float32)})
    ps.clock()
    assert {name: each.tolist() for name, each in parts.pull().items()} == {
        "a": [[1.0, 3.0], [2.0, 4.0]],
        "b": [3.0, 4.0, 5.0],
    }
    (again,) = ps.pull(parts)
    assert again["b"].dtype == torch.float64
    again["b"].zero_()
    assert parts.pull()["b"].tolist() == [3.0, 4.0, 5.0], "a read is a copy"


def test_parts_lie_on_several_servers_and_count_as_zeros_where_a_worker_leaves_them_out(tmp_path: Path) -> None:
    def work(worker: Session) -> list[list[float]]:
        rule = paceline.update.SGD(lr=1.0)
        parts = worker.table("w", shape={"a": (3,), "b": (2,)}, update=rule, scale="mean", init={"a": torch.ones(3)})
        parts.push({"a": [2.0, 2.0, 2.0]} | ({"b": [2.0, 4.0]} if worker.rank else {}))
        worker.clock()
        return [each.tolist() for each in parts.pull().values()]

    assert run_job(tmp_path, work, workers=2, servers=2) == [[[-1.0, -1.0, -1.0], [-1.0, -2.0]]] * 2


def test_a_push_is_refused_as_a_whole_and_says_which_part_is_not_finite(ps: Session) -> None:
    parts = ps.table("w", shape={"a": (2,), "b": (2,)}, update=paceline.update.Add())
    refused = parts.push({"a": [1.0, 1.0], "b": [math.nan, 1.0]})
    ps.clock()
    assert not refused.result(30.0).applied
    assert "in parameter 'b'" in refused.result().reason
    assert [each.tolist() for each in parts.pull().values()] == [[0.0, 0.0]] * 2


def test_a_notebook_gets_the_same_parts_again_and_other_workers_must_declare_the_same(tmp_path: Path) -> None:
    def work(worker: Session) -> None:
        shape = {"a": (2,), "b": (2,)}
        parts = worker.table("w", shape=shape, update=ADAM)
        assert worker.table("w", shape=shape, update=ADAM).whole is parts.whole
        worker.barrier()
        with pytest.raises(UsageError, match="the number of parameters is 1 here and 2 there"):
            worker.table("w", shape={"a": (2,)}, update=ADAM)
        if worker.rank == 0:
            worker.table("other", shape=shape, update=ADAM)
        worker.barrier()
        if worker.rank == 1:
            with pytest.raises(Refused, match="parameter 0"):
                worker.table("other", shape={"b": (2,), "a": (2,)}, update=ADAM)
        worker.barrier()

    run_job(tmp_path, work, workers=2)


MISTAKES: list[tuple[Callable[[paceline.worker.parts.PartedTable], object], str]] = [
    (lambda parts: parts.push([1.0]), "a push is .*, expected a dict of numbers by part"),
    (lambda parts: parts.push({"a": [1.0]}), r"part 'a' of a push has shape \(1,\), expected \(2,\)"),
    (lambda parts: parts.push({"a": None}), "part 'a' of a push is None, expected a tensor"),
    (lambda parts: parts.push({"a": torch.eye(2).to_sparse()}), "part 'a' of a push .* is sparse.*make it dense"),
    (lambda parts: parts.push({"a": [1.0, 2.0], "c": [1.0]}), r"a push has 'c', expected names of parts: \['a', 'b'\]"),
    (lambda parts: parts.push({0: [1.0]}), "a push has 0, expected names of parts"),
    (lambda parts: parts.push({}, samples="x"), "samples is 'x'"),
]


def test_mistakes_are_told_with_what_was_expected(ps: Session) -> None:
    parts = ps.table("w", shape={"a": (2,), "b": (2,)}, update=ADAM)
    for call, words in MISTAKES:
        with pytest.raises(UsageError, match=words):
            call(parts)
    opening: list[tuple[dict[str, object], str]] = [
        ({"shape": {}}, "it has no parameters"),
        ({"shape": {"a": 3}}, "shape is 3, expected sizes"),
        ({"shape": {1: (3,)}}, "shape: Expected `str`"),
        ({"shape": {"a": (3,)}, "view": True}, "view=True is for a table of one shape"),
        ({"shape": {"a": (3,)}, "init": {"b": torch.ones(3)}}, "init has 'b', expected names of parts"),
        ({"shape": (3,), "init": {"a": torch.ones(3)}}, "init is .*, expected a tensor"),
    ]
    for given, words in opening:
        with pytest.raises(UsageError, match=words):
            ps.table("other", update=ADAM, **given)  # type: ignore[call-overload]
    assert repr(parts) == "PartedTable('w', 2 parts of float32, bsp)"
    assert ps.clock() == 1, "the worker goes on"
