"""Gradients lie in the memory that is pushed, and scripts that do unusual things with them do not notice."""

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.jobs import run_job
from tests.training.recipes import adam, loss_of, micro_batch, one_batch, parameters, seeded, sgd
from tests.training.views import aligned
from torch import Tensor, nn

import paceline
from paceline.api.session import Session
from paceline.training.parameter_server import DistributedOptimizer

NUM_STEPS = 6


def pushed(optimizer: DistributedOptimizer, gradient: Tensor) -> bool:
    """Whether a gradient lies in the memory that the next push sends."""
    reserved = optimizer._buckets[0]._reserved
    assert reserved is not None
    memory = reserved.gradient
    return memory.data_ptr() <= gradient.data_ptr() < memory.data_ptr() + memory.nbytes


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("carrier", ["shm", "tcp"])
def test_under_bsp_backward_writes_the_push_at_the_same_place_every_step(tmp_path: Path, carrier: str) -> None:
    def work(worker: Session) -> set[tuple[int, ...]]:
        model, places = aligned(), set()
        optimizer = paceline.distributed(adam(model))
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            for part in range(2):
                one_batch(model, worker.rank, 2 * step + part)
                assert all(pushed(optimizer, gradient) for gradient in gradients(model))
                places.add(tuple(gradient.data_ptr() for gradient in gradients(model)))
            optimizer.step()
        return places

    for places in run_job(tmp_path, work, workers=2, servers=2, carrier=carrier):
        assert len(places) == 1


@pytest.mark.parametrize("consistency", ["ssp:1", "asynchronous", "backup:1"])
def test_where_servers_may_still_read_the_last_push_backward_writes_elsewhere(tmp_path: Path, consistency: str) -> None:
    def work(worker: Session) -> None:
        model = aligned()
        optimizer = paceline.distributed(sgd(model), consistency=consistency)
        for step in range(NUM_STEPS):
            one_batch(model, worker.rank, step)
            assert not any(pushed(optimizer, gradient) for gradient in gradients(model))
            optimizer.step()

    run_job(tmp_path, work, workers=2, carrier="shm")


# -- loops that a plain optimizer and ours run alike -----------------------------------------------------------------

Loop = Callable[[nn.Module, torch.optim.Optimizer, int], None]


def zeroed(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad(set_to_none=False)
    one_batch(model, 0, step)
    optimizer.step()


def zeroed_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    for gradient in gradients(model):
        gradient.detach_()
        gradient.zero_()
    one_batch(model, 0, step)
    optimizer.step()


def never_zeroed(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    one_batch(model, 0, step)
    optimizer.step()


def accumulated(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    for part in range(3):
        one_batch(model, 0, 3 * step + part)
    optimizer.step()


def absent_now_and_then(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    one_batch(model, 0, step)
    if step % 2:
        model[2].weight.grad = None
    optimizer.step()


def assigned(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.1 * step)
    optimizer.step()


def assigned_once(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """The script writes to tensors of its own, which it made the gradients in the first step."""
    if step == 0:
        for parameter in model.parameters():
            parameter.grad = parameter.own = torch.zeros_like(parameter)
    for parameter in model.parameters():
        parameter.own.fill_(0.1 * step)
    optimizer.step()


def collected_in_a_vector(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Backward adds to one vector of the script's, which it clips as a whole."""
    if step == 0:
        model.vector = torch.zeros_like(parameters(model))
        sizes = [parameter.numel() for parameter in model.parameters()]
        for parameter, part in zip(model.parameters(), model.vector.split(sizes), strict=True):
            parameter.grad = part.view_as(parameter)
    model.vector.zero_()
    one_batch(model, 0, step)
    model.vector.div_(model.vector.norm())
    optimizer.step()


def expanded(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full((1,), 0.1 * step).expand_as(parameter)
    optimizer.step()


def computed_apart(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    found = torch.autograd.grad(loss_of(model, micro_batch(0, step)), list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), found, strict=True):
        parameter.grad = gradient
    optimizer.step()


def clipped(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    one_batch(model, 0, step)
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    optimizer.step()


def two_tasks(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Gradients of one task are kept while those of the next are computed."""
    held: list[list[Tensor]] = []
    for task in range(2):
        optimizer.zero_grad()
        one_batch(model, task, step)
        held.append(gradients(model))
    for parameter, first, second in zip(model.parameters(), *held, strict=True):
        parameter.grad = first - 0.5 * second
    optimizer.step()


def remembered(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """The last step's gradients are added to this one's, and some are kept although none follow."""
    last = model.last if step else [torch.zeros_like(parameter) for parameter in model.parameters()]
    optimizer.zero_grad()
    one_batch(model, 0, step)
    model.last = gradients(model)
    if step % 2:
        optimizer.zero_grad()
    else:
        for parameter, before in zip(model.parameters(), last, strict=True):
            parameter.grad = parameter.grad + before
    optimizer.step()


def through_the_gradient(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    loss_of(model, micro_batch(0, step)).backward(create_graph=True)
    assert all(gradient.requires_grad for gradient in gradients(model))
    sum(gradient.square().sum() for gradient in gradients(model)).backward()
    optimizer.step()
    optimizer.zero_grad()  # as the graph and the gradients keep each other alive


def in_a_closure(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    def closure() -> float:
        optimizer.zero_grad()
        loss = loss_of(model, micro_batch(0, step))
        loss.backward()
        return loss.item()

    optimizer.step(closure)


def thawed_and_frozen(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    model[0].requires_grad_(step >= 2)
    model[3].requires_grad_(step < 4)
    one_batch(model, 0, step)
    optimizer.step()


def of_other_layouts(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Some gradients are seen in another order than the one in which they lie, or trade places."""
    one_batch(model, 0, step)
    square, column = model[2].weight, model[2].bias
    square.grad = square.grad.t() if step % 2 else square.grad[3:4].expand_as(square)
    column.grad, model[0].bias.grad = model[0].bias.grad, column.grad
    optimizer.step()
    optimizer.zero_grad()


LOOPS = [
    zeroed,
    zeroed_by_hand,
    never_zeroed,
    accumulated,
    absent_now_and_then,
    assigned,
    assigned_once,
    collected_in_a_vector,
    expanded,
    computed_apart,
    clipped,
    two_tasks,
    remembered,
    through_the_gradient,
    in_a_closure,
    thawed_and_frozen,
    of_other_layouts,
]


@pytest.mark.filterwarnings("ignore:Using backward")  # it warns of the cycle that zero_grad breaks
@pytest.mark.parametrize("loop", LOOPS)
def test_loops_end_with_the_bits_of_a_plain_optimizer(tmp_path: Path, loop: Loop) -> None:
    def run(wrap: Callable[[torch.optim.Optimizer], torch.optim.Optimizer]) -> tuple[Tensor, list[Tensor]]:
        model = aligned()
        model[0].requires_grad_(loop is not thawed_and_frozen)
        optimizer = wrap(adam(model))
        for step in range(NUM_STEPS):
            loop(model, optimizer, step)
        return parameters(model), [gradient.clone() for gradient in gradients(model)]

    expected, left = run(lambda optimizer: optimizer)
    assert not torch.equal(expected, parameters(aligned()))
    for found, found_left in run_job(tmp_path, lambda worker: run(paceline.distributed), servers=2, carrier="shm"):
        assert torch.equal(found, expected)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found_left, left, strict=True))


def convolution() -> nn.Module:
    def make() -> nn.Module:
        layers = [nn.Unflatten(1, (1, 3, 3)), nn.Conv2d(1, 8, 2), nn.Conv2d(8, 4, 2), nn.Flatten(), nn.Linear(4, 3)]
        return nn.Sequential(*layers).to(memory_format=torch.channels_last)

    return seeded(make)


def test_a_gradient_keeps_the_layout_that_backward_gave_it(tmp_path: Path) -> None:
    """So that whatever a script computes from it is computed in the same order."""

    def work(worker: Session) -> list[bool]:
        model = convolution()
        optimizer = paceline.distributed(sgd(model))
        for step in range(2):
            optimizer.zero_grad()
            one_batch(model, worker.rank, step)
            optimizer.step()
        return [gradient.is_contiguous() for gradient in gradients(model)]

    plain = convolution()
    one_batch(plain, 0, 0)
    assert run_job(tmp_path, work, carrier="shm") == [[gradient.is_contiguous() for gradient in gradients(plain)]]
    assert not all(gradient.is_contiguous() for gradient in gradients(plain))


@pytest.mark.parametrize("consistency", ["bsp", "asynchronous"])
def test_values_fetched_without_a_push_take_no_memory_for_pushes(tmp_path: Path, consistency: str) -> None:
    def work(worker: Session) -> bool:
        model = aligned()
        optimizer = paceline.distributed(sgd(model), consistency=consistency)
        for _ in range(4):  # more than there may be pushes under way
            worker.clock()
            optimizer.step_without_batch()
        return worker.node.client("model").pushes.num_buffers == 1

    assert run_job(tmp_path, work, carrier="shm") == [True]


# -- what goes together ---------------------------------------------------------------------------------------------


def test_an_optimizer_and_its_parameters_are_dropped_together(tmp_path: Path) -> None:
    def work(worker: Session) -> list[bool]:
        model = aligned()
        optimizer = paceline.distributed(sgd(model), model=model)
        one_batch(model, worker.rank, 0)
        optimizer.step()
        held = [weakref.ref(optimizer), *map(weakref.ref, model.parameters())]
        del model, optimizer
        gc.collect()
        return [reference() is None for reference in held]

    assert run_job(tmp_path, work, carrier="shm") == [[True] * 7]


def test_parameters_outlive_their_optimizer_and_train_with_another(tmp_path: Path) -> None:
    def work(worker: Session) -> Tensor:
        model = aligned()
        for name in ("first", "second"):
            optimizer = paceline.distributed(sgd(model), name=name)
            last = weakref.ref(optimizer)
            for step in range(3):
                optimizer.zero_grad()
                one_batch(model, worker.rank, step)
                assert all(pushed(optimizer, gradient) for gradient in gradients(model))
                optimizer.step()
            optimizer.zero_grad()
            del optimizer
            gc.collect()
            assert last() is None
        one_batch(model, worker.rank, 3)
        return parameters(model)

    expected = aligned()
    for _ in range(2):
        optimizer = sgd(expected)
        for step in range(3):
            optimizer.zero_grad()
            one_batch(expected, 0, step)
            optimizer.step()
    assert torch.equal(run_job(tmp_path, work, carrier="shm")[0], parameters(expected))


BACKWARD_IN_A_CHILD = """
import os
import torch, paceline

paceline.init()
model = torch.nn.Linear(4, 1)
optimizer = paceline.distributed(torch.optim.SGD(model.parameters(), lr=0.1))
for keep in (True, False):
    model(torch.ones(4)).backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    child = os.fork()
    if not child:
        if not keep:
            model.zero_grad()
        model(torch.full((4,), 3.0)).backward()
        expected = [4.0, 2.0] if keep else [3.0, 1.0]
        assert [parameter.grad.view(-1)[0].item() for parameter in model.parameters()] == expected
        model.zero_grad(set_to_none=False)
        assert not any(parameter.grad.any() for parameter in model.parameters())
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert all(map(torch.equal, gradients, (parameter.grad for parameter in model.parameters())))
    optimizer.step()
    optimizer.zero_grad()
"""


def test_what_a_forked_child_does_to_gradients_leaves_those_of_its_parent(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(BACKWARD_IN_A_CHILD)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
