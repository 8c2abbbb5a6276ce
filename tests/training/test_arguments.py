"""What scripts give to calls of the package by mistake is told in our words, at once, and nothing is broken by it."""

import copy
import math
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.jobs import run_job
from torch import nn

import paceline
from paceline.api.session import Session
from paceline.errors import UsageError


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


NO_NORMS: list[tuple[object, object, str]] = [
    ("x", 2.0, "max_norm is 'x', expected one real number"),
    (None, 2.0, "max_norm is None, expected one real number"),
    (-1.0, 2.0, "max_norm is -1 and norm_type 2, expected a norm above 0"),
    (0, 2.0, "max_norm is 0 and norm_type 2, expected a norm above 0"),
    (math.nan, 2.0, "max_norm is nan and norm_type 2, expected a norm above 0"),
    (1.0, math.nan, "max_norm is 1 and norm_type nan, expected a norm above 0 .*, and 2 or another number"),
    (1.0, torch.ones(2), "norm_type is a tensor"),
]


def test_what_is_distributed_already_is_told_so(tmp_path: Path) -> None:
    def work(_worker: Session) -> None:
        made = paceline.distributed(sgd(nn.Linear(1, 1)))
        with pytest.raises(UsageError, match=r"Distributed SGD.*, which paceline.distributed has returned. Go on with"):
            paceline.distributed(made)

    run_job(tmp_path, work)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"optimizer": torch.optim.SGD}, "the optimizer is the class SGD, expected one that was made"),
        ({"optimizer": None}, "the optimizer is None"),
        ({"optimizer": nn.Linear(1, 1)}, "the optimizer is Linear"),
        ({"model": nn.Linear}, "model is the class Linear, expected the torch.nn.Module"),
        ({"model": 3}, "model is 3"),
        ({"strategy": 3}, "strategy is 3, expected a name such as 'ssp:3'"),
        ({"strategy": paceline.strategies.all_reduce}, "strategy is <function all_reduce"),
        ({"strategy": {"*": 3}}, "strategy is 3"),
        ({"strategy": {3: "bsp"}}, "strategy has the key 3, expected a pattern of names of parameters"),
        ({"consistency": 3}, "consistency is 3, expected 'ssp:3'"),
        ({"fetch_every": 1.5}, "fetch_every is 1.5"),
        ({"name": 3}, "name is 3"),
        ({"optimizer": sgd(nn.Linear(2, 1, device="meta"))}, "is on device meta and has no values"),
        ({"optimizer": sgd(nn.LazyLinear(1))}, "a lazy layer has no shape yet: run the model once on a batch"),
        ({"model": nn.Linear(1, 1)}, "none of the optimizer's parameters is in model: give the model whose"),
    ],
)
def test_distributed_refuses_what_is_of_a_wrong_type(settings: dict[str, object], words: str, tmp_path: Path) -> None:
    def work(_worker: Session) -> None:
        given = {"optimizer": sgd(nn.Linear(1, 1)), **settings}
        with pytest.raises(UsageError, match=words):
            paceline.distributed(given.pop("optimizer"), **given)

    run_job(tmp_path, work)


def test_other_calls_refuse_what_is_no_number_tensor_or_source_and_training_goes_on(tmp_path: Path) -> None:
    def work(worker: Session) -> None:
        model = nn.Linear(2, 1)
        optimizer = paceline.distributed(sgd(model), model=model)
        embedding = paceline.Embedding(10, 3, name="e", update=paceline.update.SGD(lr=0.1))
        mistakes = [
            (lambda: paceline.report(loss="x"), "report, worker 0, clock 0: loss is 'x', expected one real number"),
            (lambda: paceline.report(loss=torch.ones(2)), r"loss is a tensor \(2,\) of float32.*loss.mean\(\)"),
            (lambda: paceline.report(loss=1.0, accuracy=1j), "accuracy is 1j"),
            (lambda: paceline.report(loss=torch.ones((), device="meta")), "loss is a tensor"),
            (lambda: paceline.all_reduce([1.0]), r"all_reduce got \[1.0\], expected a tensor"),
            (lambda: paceline.broadcast(None), "broadcast got None"),
            (lambda: paceline.all_gather(torch.ones(1, device="meta")), "on device meta"),
            (lambda: paceline.reduce(torch.ones(1), root="x"), "root is worker 'x', expected 0 to 0"),
            (lambda: paceline.shard(range), "cannot shard the class range"),
            (lambda: paceline.init("x"), "init\\('x'\\): an address is for connect"),
            (lambda: paceline.connect(3), "connect: the address is 3"),
            (lambda: embedding([1, 2]), r"embedding of table 'e' was given \[1, 2\], expected a tensor of integers"),
            (lambda: embedding(np.arange(3)[::-1]), r"given an array.*: torch.tensor\(ids.copy\(\)\)"),
            (lambda: paceline.Embedding(1.5, 3, update=paceline.update.SGD(lr=0.1)), "num_embeddings is 1.5"),
            (lambda: paceline.parallelize(nn.Linear, loss=nn.functional.mse_loss), "the model is the class Linear"),
            (lambda: paceline.parallelize(nn.Linear(1, 1), loss=nn.MSELoss), "loss is the class MSELoss"),
            (lambda: paceline.sources.lines(3), "3 is a int, expected one path"),
        ]
        for call, words in mistakes:
            with pytest.raises(UsageError, match=words):
                call()
        model(torch.ones(1, 2)).sum().backward()
        for max_norm, norm_type, words in NO_NORMS:
            with pytest.raises(UsageError, match=f"clip_gradients of 'model': {words}"):
                optimizer.clip_gradients(max_norm, norm_type)
        assert optimizer.clip_gradients(torch.tensor(100.0), "inf") == 1.0
        with pytest.raises(UsageError, match="step of 'model': samples is 'x'"):
            optimizer.step(samples="x")
        optimizer.step()  # what was refused has sent nothing, and holds nothing
        assert worker.node.clock == 1

    run_job(tmp_path, work)


def test_numbers_that_turn_gradients_are_refused_where_servers_clip_too(tmp_path: Path) -> None:
    def work(_: Session) -> None:
        model = nn.Linear(2, 1)
        optimizer = paceline.distributed(sgd(model), model=model)
        model(torch.ones(1, 2)).sum().backward()
        for max_norm, norm_type, words in NO_NORMS:
            with pytest.raises(UsageError, match=words):
                optimizer.clip_gradients(max_norm, norm_type)
        optimizer.step()

    run_job(tmp_path, work, workers=2)


@pytest.mark.parametrize("samples", ["x", None, -1, math.nan, math.inf, True, torch.ones(2)])
def test_weights_are_numbers_of_samples(samples: object, tmp_path: Path) -> None:
    def work(_: Session) -> None:
        model = nn.Linear(2, 1)
        optimizer = paceline.distributed(sgd(model), model=model, strategy="all-reduce")
        with pytest.raises(UsageError, match=r"weigh: samples is .*, expected a number of 0 or more"):
            optimizer.weigh(samples)
        with pytest.raises(UsageError, match="weigh got 0 samples, expected more than 0"):
            optimizer.weigh(0)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    run_job(tmp_path, work)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("strategy", ["bsp", "all-reduce", "local-sgd:2"])
def test_an_optimizer_cannot_be_copied(copied: Callable[[object], object], strategy: str, tmp_path: Path) -> None:
    """A copy would have neither a part in the job nor what `repr` shows."""

    def work(_: Session) -> None:
        model = nn.Linear(2, 1)
        optimizer = paceline.distributed(sgd(model), model=model, strategy=strategy)
        with pytest.raises(UsageError, match=r"'model' cannot be copied or pickled, .*: keep state_dict"):
            copied(optimizer)
        copied(optimizer.state_dict())

    run_job(tmp_path, work)
