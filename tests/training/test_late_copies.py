"""Copies that are done as late as may be are in time: gradients before they are sent, values before others come."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.jobs import run_job
from tests.training.recipes import Recipe, adam, loss_of, micro_batch, mlp, one_batch, parameters, sgd, train_alone
from torch import Tensor, nn
from torch.nn import functional

import paceline
from paceline.api.session import Session
from paceline.core.partition import Range
from paceline.training.flat import FlatParameters, Gradients
from paceline.update.named_rules import Add
from paceline.update.table import Segment, TableSpec
from paceline.worker.cache import TableCache


@dataclass
class Late:
    """A copy to the host that is made when it is waited for, after all that were begun before."""

    queue: list[Late]
    source: Tensor
    out: Tensor

    def synchronize(self) -> None:
        while self in self.queue:
            first = self.queue.pop(0)
            first.out.copy_(first.source)

    def __eq__(self, other: object) -> bool:
        return self is other


@dataclass
class Reader:
    """A copy from the host that goes on until it is waited for: what it reads must not change meanwhile."""

    source: Tensor
    before: Tensor
    done: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        with self.lock:  # the threads of several servers may wait
            assert self.done or torch.equal(self.source, self.before), "values changed while a device read them"
            self.done = True


@dataclass
class LateDeviceCopies:
    """Treats tensors of the host as if they were on a device."""

    serves: Callable[[Tensor], bool]
    hides: bool = True
    num_begun: int = 0
    readers: list[Reader] = field(default_factory=list)
    queue: list[Late] = field(default_factory=list)
    delivered: list[Tensor] = field(default_factory=list)

    def can_hide(self, out: Tensor) -> bool:
        return self.hides

    def fetch(self, source: Tensor, out: Tensor) -> Late:
        self.num_begun += 1
        self.queue.append(Late(self.queue, source, out))
        return self.queue[-1]

    def deliver(self, source: Tensor, out: Tensor) -> None:
        out.copy_(source)
        self.delivered.append(source)

    def queued(self) -> list[Reader]:
        found = [Reader(source, source.clone()) for source in self.delivered]
        self.delivered.clear()
        self.readers += found
        return found

    def lock(self, owner: object, memory: Tensor) -> None:
        assert memory.numel() == 224


def everything(tensor: Tensor) -> bool:
    return True


def matrices(tensor: Tensor) -> bool:
    return tensor.ndim == 2


@dataclass
class AllDeviceCopies:
    """Those of all workers of a test."""

    serves: Callable[[Tensor], bool] = everything
    hides: bool = True
    made: list[LateDeviceCopies] = field(default_factory=list)

    def serving(self, tensors: object) -> LateDeviceCopies:
        self.made.append(LateDeviceCopies(self.serves, self.hides))
        return self.made[-1]


@pytest.fixture
def all_copies(monkeypatch: pytest.MonkeyPatch) -> AllDeviceCopies:
    made = AllDeviceCopies()
    monkeypatch.setattr("paceline.training.parameter_server.DeviceCopies", made)
    return made


Loop = Callable[[nn.Module, torch.optim.Optimizer, int, int], None]


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    optimizer.zero_grad()
    one_batch(model, rank, step)
    optimizer.step()


def clipped(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    optimizer.zero_grad()
    one_batch(model, rank, step)
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()


def twice(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    optimizer.zero_grad()
    for part in range(2):
        one_batch(model, rank, 2 * step + part)
    optimizer.step()


def replaced(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    optimizer.zero_grad()
    one_batch(model, rank, step)
    for parameter in model.parameters():
        parameter.grad = 0.5 * parameter.grad
    optimizer.step()


def absent_now_and_then(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    optimizer.zero_grad()
    one_batch(model, rank, step)
    if step % 2:
        model[2].weight.grad = None
    optimizer.step()


def run(loop: Loop, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> Tensor:
    for step in range(6):
        loop(model, optimizer, rank, step)
    return parameters(model)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("serves", [everything, matrices])
@pytest.mark.parametrize("loop", [plain, clipped, twice, replaced, absent_now_and_then])
def test_gradients_are_there_before_they_are_sent(
    tmp_path: Path, all_copies: AllDeviceCopies, overlap: bool, serves: Callable[[Tensor], bool], loop: Loop
) -> None:
    all_copies.serves = serves

    def work(worker: Session) -> Tensor:
        model = mlp()
        optimizer = paceline.distributed(adam(model), overlap=overlap, model=model)
        run(loop, model, optimizer, worker.rank)
        optimizer.wait_for_values()
        return parameters(model)

    model = mlp()
    expected = run(loop, model, adam(model), 0)
    for found in run_job(tmp_path, work, servers=2, carrier="shm"):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("carrier", ["memory", "shm", "tcp"])
@pytest.mark.parametrize("consistency", ["bsp", "essp:0", "bound=0,visible=on_clock,deliver=on_clock,backups=0"])
def test_values_stay_while_devices_read_them(
    tmp_path: Path, all_copies: AllDeviceCopies, carrier: str, consistency: str
) -> None:
    def work(worker: Session) -> Tensor:
        model = mlp()
        optimizer = paceline.distributed(sgd(model), consistency=consistency)
        for step in range(6):
            plain(model, optimizer, worker.rank, step)
            with optimizer.snapshot():
                parameters(model)
        return parameters(model)

    found = run_job(tmp_path, work, workers=2, carrier=carrier)
    if consistency != "essp:0":
        assert torch.equal(found[0], train_alone(Recipe(optimizer=sgd, num_steps=6), 2)[0])
    for device_copies in all_copies.made:
        assert sum(reader.done for reader in device_copies.readers) >= 4 * 6, (
            "the thread that brought new values has waited"
        )


def test_copies_begin_while_backward_runs_and_are_not_made_twice(tmp_path: Path, all_copies: AllDeviceCopies) -> None:
    def work(worker: Session) -> list[int]:
        model = mlp()
        optimizer = paceline.distributed(sgd(model), overlap=True, model=model)
        with optimizer.accumulate():
            one_batch(model, worker.rank, 0)
        nums = [all_copies.made[0].num_begun]
        loss_of(model, micro_batch(worker.rank, 1)).backward()
        nums.append(all_copies.made[0].num_begun)
        assert not optimizer._buckets[0]._sent, "nothing is sent before it is computed"
        optimizer.step()
        return [*nums, all_copies.made[0].num_begun]

    assert run_job(tmp_path, work) == [[0, 4, 4]]


def test_copies_that_block_are_not_begun_while_backward_runs(tmp_path: Path, all_copies: AllDeviceCopies) -> None:
    all_copies.hides = False

    def work(worker: Session) -> list[int]:
        model = mlp()
        optimizer = paceline.distributed(sgd(model), overlap=True, model=model)
        one_batch(model, worker.rank, 0)
        before = all_copies.made[0].num_begun
        optimizer.step()
        return [before, all_copies.made[0].num_begun]

    assert run_job(tmp_path, work) == [[0, 4]]


def test_without_overlap_nothing_is_copied_before_the_script_says_that_gradients_are_final(
    tmp_path: Path, all_copies: AllDeviceCopies
) -> None:
    """Torch does not notice every change: `GradScaler.unscale_` is one that it does not count."""

    def work(worker: Session) -> Tensor:
        model = mlp()
        optimizer = paceline.distributed(sgd(model))
        for step in range(6):
            optimizer.zero_grad()
            loss_of(model, micro_batch(worker.rank, step)).mul(8).backward()
            gradients = [parameter.grad for parameter in model.parameters()]
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, torch.zeros(1), torch.full((1,), 1 / 8))
            optimizer.step()
        return parameters(model)

    assert torch.equal(run_job(tmp_path, work)[0], train_alone(Recipe(optimizer=sgd, num_steps=6), 1)[0])


def test_a_gradient_that_leaves_its_device_does_not_meet_its_older_copy() -> None:
    weight = nn.Parameter(torch.zeros(4))
    away: Any = LateDeviceCopies(lambda tensor: tensor is weight or bool(tensor[0] == 1))
    gradients = Gradients(FlatParameters.over({"w": weight}), in_place=False, device_copies=away)
    buffer = torch.empty(4)
    gradients.attach(buffer)
    weight.grad = torch.ones(4)
    gradients.fetch(0)
    weight.grad = torch.full((4,), 2.0)
    assert gradients.collect() == ()
    assert (buffer.tolist(), away.queue) == ([2.0] * 4, [])


def test_another_gradient_in_the_same_place_is_copied_as_well() -> None:
    weight = nn.Parameter(torch.zeros(4))
    away: Any = LateDeviceCopies(everything)
    gradients = Gradients(FlatParameters.over({"w": weight}), in_place=False, device_copies=away)
    gradients.attach(torch.empty(4))
    weight.grad = torch.ones(4)
    gradients.fetch(0)
    weight.grad = weight.grad.data.mul_(2).data
    gradients.collect()
    assert away.num_begun == 2


def test_nothing_is_copied_into_memory_that_was_sent(tmp_path: Path, all_copies: AllDeviceCopies) -> None:
    """As when a parameter is used by another module than its own, so that its values are not waited for."""

    def work(worker: Session) -> list[int]:
        model = mlp()
        optimizer = paceline.distributed(sgd(model), overlap=True, model=model)
        one_batch(model, worker.rank, 0)
        optimizer.step()
        before = all_copies.made[0].num_begun
        functional.linear(torch.ones(9), model[0].weight).sum().backward()
        return [all_copies.made[0].num_begun - before]

    assert run_job(tmp_path, work) == [[0]]


def test_new_values_wait_for_readers_of_the_old() -> None:
    spec = TableSpec("w", (Segment("w", (4,)),), "float32", Add(), "ssp:1", "sum", "reject")
    cache = TableCache(spec, (Range(0, 0, 4),), reads_own_writes=False)
    assert cache.memory is not None
    done, ongoing = (Reader(cache.memory, cache.memory.clone(), done) for done in (True, False))
    cache.note_device_read(done)
    cache.note_device_read(ongoing)
    assert cache._device_reads == [ongoing]
    cache.install(0, memoryview(torch.ones(4).numpy()).cast("B"), settled=0, includes=())
    assert ongoing.done
    assert cache.memory.tolist() == [1.0] * 4
