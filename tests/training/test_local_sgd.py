"""Local SGD and DiLoCo as jobs of threads: what they learn is what a plain loop over all workers learns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from tests.jobs import run_job
from tests.training.recipes import loss_of, mlp, parameters
from torch import Tensor, nn

import paceline
from paceline.api.session import Session
from paceline.errors import UsageError
from paceline.job.strategy import Distribution
from paceline.training.arguments import choose_strategy
from paceline.training.local_sgd import ExchangeRounds, Fragment, LocalSGD
from paceline.transport.base import Frame
from paceline.transport.memory import MemoryConnection

EXACT = {"rtol": 1e-10, "atol": 1e-12}


def batch_of(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(5, 9, generator=generator, dtype=torch.float64)


def model_of() -> nn.Module:
    return mlp().double()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


Make = Callable[[nn.Module], torch.optim.Optimizer]


def train_in_job(
    worker: Session, strategy: LocalSGD, make: Make, num_steps: int, samples: tuple[float, ...]
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Train as one worker; return its own parameters, the servers' values, and its state."""
    model = model_of()
    optimizer = paceline.distributed(make(model), strategy=strategy, model=model)
    for step in range(num_steps):
        optimizer.zero_grad()
        loss_of(model, batch_of(worker.rank, step)).backward()
        optimizer.step(samples=samples[worker.rank])
    own = parameters(model)
    with optimizer.snapshot():
        common = parameters(model)
    assert torch.equal(parameters(model), own)
    paceline.barrier()
    state = optimizer.state_dict()
    paceline.barrier()
    return own, common, state


class PlainRounds:
    """The same by one process in a plain loop, with an outer optimizer of torch for each fragment."""

    def __init__(self, rounds: ExchangeRounds, make: Make, samples: tuple[float, ...]) -> None:
        self.rounds, self.samples = rounds, samples
        self.models = [model_of() for _ in samples]
        self.inner = [make(model) for model in self.models]
        self.common = [parameter.detach().clone() for parameter in self.models[0].parameters()]
        self.fragments = [list(range(turn, len(self.common), rounds.fragments)) for turn in range(rounds.fragments)]
        momentum = rounds.outer_momentum
        self.outer = [
            torch.optim.SGD([self.common[i] for i in one], rounds.outer_lr, momentum, nesterov=momentum > 0)
            for one in self.fragments
        ]
        self.waiting: dict[int, int] = {}  # by fragment, the step after which its values are taken

    def train(self, num_steps: int) -> None:
        for step in range(1, num_steps + 1):
            for rank, (model, inner) in enumerate(zip(self.models, self.inner, strict=True)):
                inner.zero_grad()
                loss_of(model, batch_of(rank, step - 1)).backward()
                inner.step()
            for turn, one in enumerate(self.fragments):
                if (step - (turn + 1) * self.rounds.steps // self.rounds.fragments) % self.rounds.steps == 0:
                    self.exchange(turn, one)
                    self.waiting[turn] = step + self.rounds.overlap_steps
                if self.waiting.get(turn) == step:
                    self.take(one)

    def exchange(self, turn: int, one: list[int]) -> None:
        for index in one:
            ways = [self.common[index] - list(model.parameters())[index].detach() for model in self.models]
            weighted = [way * count for way, count in zip(ways, self.samples, strict=True)]
            self.common[index].grad = torch.stack(weighted).sum(0) / sum(self.samples)
        self.outer[turn].step()

    def take(self, one: list[int]) -> None:
        with torch.no_grad():
            for model in self.models:
                for index in one:
                    list(model.parameters())[index].lerp_(self.common[index], self.rounds.merge)


def check_against_plain(tmp_path: Path, strategy: LocalSGD, make: Make, num_steps: int) -> None:
    samples = (1.0, 3.0, 2.0)
    plain = PlainRounds(strategy.rounds, make, samples)
    plain.train(num_steps)
    found = run_job(tmp_path, lambda w: train_in_job(w, strategy, make, num_steps, samples), workers=3, servers=2)
    expected = torch.cat([value.reshape(-1) for value in plain.common])
    for rank, (own, common, state) in enumerate(found):
        torch.testing.assert_close(common, expected, **EXACT)
        torch.testing.assert_close(own, parameters(plain.models[rank]), **EXACT)
        inner = plain.inner[rank].state_dict()
        torch.testing.assert_close(state["state"], inner["state"], **EXACT)  # it has survived every round


STRATEGIES = {
    "local": paceline.strategies.local_sgd(steps=3),
    "diloco": paceline.strategies.diloco(steps=4),
    "fragments": paceline.strategies.diloco(steps=4, fragments=2, outer_lr=0.5),
    "overlap": paceline.strategies.diloco(steps=4, fragments=3, overlap_steps=2, merge=0.5),
}


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_workers_learn_what_a_plain_loop_learns(tmp_path: Path, strategy: LocalSGD) -> None:
    """Sign, weights by samples, momentum, turns of fragments, overlap and inner state: all differ from any mistake."""
    check_against_plain(tmp_path, strategy, adam, num_steps=10)


def take_and_forget(fragment: Fragment, merge: float, take: Any = Fragment.merge_values) -> None:
    before = fragment._anchor.clone()
    take(fragment, merge)
    fragment._anchor.copy_(before)


MUTANTS: dict[str, tuple[type, str, Any]] = {
    "new minus old": (Fragment, "write_way", lambda f, out: (f.flat.pack_values(out), out.sub_(f._anchor))),
    "a push repeats the one before": (Fragment, "merge_values", take_and_forget),
    "samples do not weigh": (
        Fragment,
        "push",
        lambda f, push=Fragment.push: (setattr(f, "num_samples", 1.0), push(f))[1],
    ),
    "no momentum": (ExchangeRounds, "rule", lambda rounds, n: paceline.update.SGD(rounds.outer_lr)),
    "a turn too early": (ExchangeRounds, "_phase", lambda rounds, turn: turn * rounds.steps // rounds.fragments),
}


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_a_mistake_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutant: tuple[type, str, Any]) -> None:
    monkeypatch.setattr(*mutant)
    with pytest.raises(AssertionError, match="not close"):
        check_against_plain(tmp_path, STRATEGIES["fragments"], adam, num_steps=8)


def test_with_an_exchange_after_every_step_of_sgd_it_is_bsp(tmp_path: Path) -> None:
    def work(worker: Session) -> tuple[Tensor, Tensor]:
        found: list[Tensor] = []
        for name, strategy in (("bsp", "bsp"), ("local", paceline.strategies.local_sgd(steps=1))):
            model = model_of()
            optimizer = paceline.distributed(sgd(model), strategy=strategy, model=model, name=name)
            for step in range(8):
                optimizer.zero_grad()
                loss_of(model, batch_of(worker.rank, step)).backward()
                optimizer.step(samples=1 + worker.rank)
            found.append(parameters(model))
        return found[0], found[1]

    for bsp, local in run_job(tmp_path, work, workers=3):
        torch.testing.assert_close(local, bsp, **EXACT)


# -- bytes -----------------------------------------------------------------------------------------------------------


def test_bytes_fall_by_the_steps_of_a_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: Counter[str] = Counter()
    pack = MemoryConnection._pack

    def count_and_pack(connection: MemoryConnection, header: bytes, body: memoryview) -> tuple[Frame, int]:
        sent.update(header=len(header), body=body.nbytes)
        return pack(connection, header, body)

    monkeypatch.setattr(MemoryConnection, "_pack", count_and_pack)
    at_start = Barrier(2, action=sent.clear)
    num_steps, num_parameters = 12, 40_000

    def count(strategy: LocalSGD | str) -> Counter[str]:
        def work(worker: Session) -> None:
            model = nn.Linear(num_parameters, 1, bias=False)
            optimizer = paceline.distributed(torch.optim.SGD(model.parameters(), lr=0.1), strategy=strategy)
            at_start.wait(120)
            for _ in range(num_steps):
                optimizer.zero_grad()
                model(torch.ones(1, num_parameters)).sum().backward()
                optimizer.step()

        run_job(tmp_path, work, workers=2)
        return Counter(sent)

    bsp = count("bsp")
    for steps, fragments in ((4, 1), (6, 1)):
        local = count(paceline.strategies.diloco(steps=steps, fragments=fragments))
        assert local["body"] * steps == bsp["body"] == 2 * 2 * num_steps * num_parameters * 4  # there and back
        assert local.total() / bsp.total() == pytest.approx(1 / steps, rel=0.02)


def test_every_fragment_is_exchanged_once_a_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[str, int]] = []
    plain_push = Fragment.push

    def push(fragment: Fragment) -> Any:
        found.append((fragment.table.name, fragment.table.node.clock + 1))
        return plain_push(fragment)

    monkeypatch.setattr(Fragment, "push", push)
    strategy = paceline.strategies.diloco(steps=6, fragments=3)
    run_job(tmp_path, lambda w: train_in_job(w, strategy, sgd, 12, (1.0,)), workers=1)
    turns = [("model.0", 2), ("model.1", 4), ("model.2", 6)]
    assert found == turns + [(name, step + 6) for name, step in turns]


# -- the face --------------------------------------------------------------------------------------------------------


def test_a_saved_job_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    def train(worker: Session, model: nn.Module, optimizer: Any, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            loss_of(model, batch_of(worker.rank, step)).backward()
            optimizer.step()

    def work(worker: Session) -> None:
        model, other = model_of(), model_of()
        optimizer = paceline.distributed(adam(model), strategy=paceline.strategies.diloco(steps=3), model=model)
        train(worker, model, optimizer, range(6))
        paceline.barrier()
        state = deepcopy(optimizer.state_dict())
        with optimizer.snapshot():
            values = {name: value.clone() for name, value in model.state_dict().items()}
        paceline.barrier()
        train(worker, model, optimizer, range(6, 12))
        again = paceline.distributed(
            adam(other), strategy=paceline.strategies.diloco(steps=3), model=other, name="again"
        )
        other.load_state_dict(values)
        renamed = {**state, "outer": {"again": state["outer"]["model"]}}
        again.load_state_dict(renamed)
        train(worker, other, again, range(6, 12))
        torch.testing.assert_close(parameters(other), parameters(model), rtol=0, atol=0)
        assert state["outer"]["model"][0]["momentum_buffer"].abs().sum() > 0
        with pytest.raises(UsageError, match=r"has the tables model, and 'again' again: it is of another model"):
            again.load_state_dict(state)
        with pytest.raises(UsageError, match="4 parameters, which do not make 5 fragments"):
            paceline.distributed(sgd(model), strategy=paceline.strategies.diloco(steps=5, fragments=5), name="five")
        with pytest.raises(UsageError, match="leave out overlap=True"):
            paceline.distributed(sgd(model), strategy="diloco", name="six", overlap=True)
        with pytest.raises(UsageError, match="has all its parameters"):
            again.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
        assert "Distributed AdamW, exchanged every 3 steps" in repr(again)

    run_job(tmp_path, work, workers=2)


def with_norm() -> nn.Module:
    return nn.Sequential(*mlp(), nn.BatchNorm1d(3)).double()


IN_PARTS = paceline.strategies.diloco(steps=4, fragments=2)
UNDER_WAY = paceline.strategies.diloco(steps=4, fragments=3, overlap_steps=2, merge=0.5)


@pytest.mark.parametrize(
    ("strategy", "loaded", "saved_at"),
    [
        (IN_PARTS, "snapshot", 2),
        (IN_PARTS, "own", 3),
        (IN_PARTS, "all in a snapshot", 3),
        (IN_PARTS, "of worker 0", 4),
        (UNDER_WAY, "snapshot", 2),
        (UNDER_WAY, "own", 3),
        (UNDER_WAY, "snapshot", 5),
        (UNDER_WAY, "all in a snapshot", 5),
        (paceline.strategies.local_sgd(steps=5), "own", 3),
    ],
)
def test_a_job_saved_in_any_step_of_a_round_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, strategy: LocalSGD, loaded: str, saved_at: int
) -> None:
    def train(worker: Session, model: nn.Module, optimizer: Any, steps: range) -> Tensor:
        for step in steps:
            optimizer.zero_grad()
            loss_of(model, batch_of(worker.rank, step)).backward()
            optimizer.step(samples=1 + worker.rank)
        return torch.cat([*map(torch.flatten, model.parameters()), model[3].running_mean])

    def make() -> tuple[nn.Module, Any]:
        model = with_norm()
        return model, paceline.distributed(adam(model), strategy=strategy, model=model)

    def save(worker: Session) -> tuple[Any, Any, Tensor]:
        model, optimizer = make()
        train(worker, model, optimizer, range(saved_at))
        paceline.barrier()
        state = deepcopy(optimizer.state_dict())
        values = deepcopy(model.state_dict())
        if "snapshot" in loaded:
            with optimizer.snapshot():
                values = deepcopy(model.state_dict())
                if "all" in loaded:
                    state = deepcopy(optimizer.state_dict())
        paceline.barrier()
        return state, values, train(worker, model, optimizer, range(saved_at, 12))

    def go_on(worker: Session) -> Tensor:
        state, values, _ = saved[worker.rank]
        model, optimizer = make()
        if worker.rank == 0 or loaded != "of worker 0":
            model.load_state_dict(values)
        optimizer.load_state_dict(state)
        return train(worker, model, optimizer, range(saved_at, 12))

    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    saved = run_job(first, save, workers=2)
    for found, (_, _, expected) in zip(run_job(second, go_on, workers=2), saved, strict=True):
        torch.testing.assert_close(found, expected, **EXACT)


def test_a_state_beside_another_model_starts_from_that(tmp_path: Path) -> None:
    def work(worker: Session) -> None:
        model = model_of()
        optimizer = paceline.distributed(sgd(model), strategy=paceline.strategies.diloco(steps=4), model=model)
        loss_of(model, batch_of(worker.rank, 0)).backward()
        optimizer.step()
        paceline.barrier()
        state = optimizer.state_dict()
        state["round"]["unsent"] = deepcopy(state["round"]["unsent"])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.5)
        optimizer.load_state_dict(state)
        assert (parameters(model) == 0.5).all()
        for unsent, message in (
            ([None, None], "of 2 tables"),
            ([{"common": torch.ones(3), "own": torch.ones(3)}], r"\(3,\)"),
        ):
            with pytest.raises(UsageError, match=message):
                optimizer.load_state_dict({**state, "round": {"num_steps": 1, "unsent": unsent}})

    run_job(tmp_path, work)


def test_a_line_of_text_names_it() -> None:
    assert choose_strategy(None, Distribution.parse("diloco:7")) == paceline.strategies.diloco(7)
    assert choose_strategy("local-sgd:4", Distribution()) == paceline.strategies.local_sgd(4)
    assert choose_strategy("local-sgd", Distribution()) == paceline.strategies.local_sgd()


def test_momentum_of_stale_pushes_is_not_that_of_a_round() -> None:
    assert paceline.strategies.diloco().rounds.outer_lr == 0.7
    assert paceline.strategies.diloco(asynchronous=True).rounds.outer_lr == 0.07
    assert paceline.strategies.diloco(asynchronous=True, outer_momentum=0.0).rounds.outer_lr == 0.7
    assert paceline.strategies.diloco(asynchronous=True, delayed=4).rounds.outer_lr == 0.7


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"steps": 0}, "expected 1 or more"),
        ({"fragments": 51}, "cannot take turns in 50 steps"),
        ({"overlap_steps": 50}, "before the next exchange"),
        ({"merge": 0.0}, "more than 0"),
        ({"outer_lr": 0.0}, "expected a rate above 0"),
        ({"outer_momentum": 1.0}, "less than 1"),
        ({"quorum": 2}, "add asynchronous=True"),
        ({"asynchronous": True, "grace_s": 1.0}, "add quorum="),
        ({"asynchronous": True, "delayed": 2, "outer_momentum": 0.0}, "leave one of them out"),
        ({"asynchronous": True, "quorum": 0}, "expected 1 or more"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(numbers: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        paceline.strategies.diloco(**numbers)
    assert replace(paceline.strategies.diloco().rounds, steps=7).steps == 7
