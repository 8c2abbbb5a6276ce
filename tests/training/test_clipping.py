"""`clip_gradients` clips what torch's DDP clips: the mean of all workers' gradients, under any optimizer of torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from tests.jobs import run_job
from tests.training.recipes import seeded
from torch import Tensor, nn

import paceline
from paceline.api.session import Session
from paceline.core.messages import Push, PushId
from paceline.server.push_checks import push_problem
from paceline.update.clipping import with_clip, without_clip
from paceline.update.named_rules import SGD
from paceline.update.table import Segment, TableSpec
from paceline.wire.messages import PushFrame

MAX_NORM = 0.3
STEPS = 5


def model() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).double())


def loss_of(net: nn.Module, rank: int, step: int) -> Tensor:
    batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)
    return (net(batch) - 3.0).square().mean() * (1.0 if step % 2 else 0.01)  # every second step is not clipped


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    first, second = list(net.parameters())[:2], list(net.parameters())[2:]
    return torch.optim.AdamW([{"params": first}, {"params": second, "lr": 0.02}], lr=0.05)


def as_ddp_does(num_workers: int) -> tuple[list[Tensor], set[bool]]:
    net, clips = model(), set[bool]()
    optimizer = optimizer_of(net)
    for step in range(STEPS):
        optimizer.zero_grad()
        (torch.stack([loss_of(net, rank, step) for rank in range(num_workers)]).mean()).backward()
        clips.add(bool(nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM) > MAX_NORM))
        optimizer.step()
    return [parameter.detach() for parameter in net.parameters()], clips


def trained(**options: Any) -> list[Tensor]:
    net = model()
    optimizer = paceline.distributed(optimizer_of(net), model=net, **options)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(net, paceline.rank(), step).backward()
        own = nn.utils.get_total_norm([parameter.grad for parameter in net.parameters() if parameter.grad is not None])
        assert torch.equal(optimizer.clip_gradients(MAX_NORM), own)
        optimizer.step()
    with optimizer.snapshot():
        return [parameter.detach().clone() for parameter in net.parameters()]


@pytest.mark.parametrize(
    ("workers", "servers", "carrier"),
    [(1, 1, "memory"), (3, 1, "memory"), (2, 1, "shm"), (2, 1, "tcp"), (3, 2, "memory"), (2, 3, "shm"), (2, 2, "tcp")],
)
def test_the_mean_of_all_gradients_is_clipped(tmp_path: Path, workers: int, servers: int, carrier: str) -> None:
    expected, clips = as_ddp_does(workers)
    assert clips == {True, False}
    for found in run_job(tmp_path, lambda _: trained(), workers=workers, servers=servers, carrier=carrier):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("strategy", ["bsp", {"*": "bsp"}])
def test_a_limit_is_for_the_gradients_that_are_there_and_the_lowest_of_several_counts(
    tmp_path: Path, strategy: object
) -> None:
    def moved(_: Session) -> list[float]:
        weight = nn.Parameter(torch.zeros(1))
        optimizer = paceline.distributed(torch.optim.SGD([weight], lr=1.0), strategy=strategy)
        found = []
        for limits in ((1.0,), (), (1.0, 5.0, math.inf), (5.0, 2.0)):
            before = weight.item()
            optimizer.zero_grad()
            (10.0 * weight).sum().backward()
            for limit in limits:
                optimizer.clip_gradients(limit)
            if limits != (1.0,):  # else the gradients are dropped
                optimizer.step()
            found.append(before - weight.item())
        return found

    for found in run_job(tmp_path, moved, workers=2):
        assert found == pytest.approx([0.0, 10.0, 1.0, 2.0], rel=1e-5)


@pytest.mark.parametrize(
    ("shares", "options", "norm_type", "reason"),
    [
        ((0.0, 0.5, 0.5), {}, 2.0, "server 0, which leads the others, has no part of the model"),
        ((), {"overlap": True}, 2.0, "overlap=True sends gradients in parts"),
        ((), {"scale": "mean"}, 2.0, "the scale is 'mean'"),
        ((), {}, float("inf"), "servers compute no norm of another type than 2"),
    ],
)
def test_where_servers_cannot_clip_the_mean_each_worker_clips_its_own_and_says_so(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    shares: tuple[float, ...],
    options: dict[str, Any],
    norm_type: float,
    reason: str,
) -> None:
    def own(worker: Session) -> float:
        net = nn.Linear(200, 1, bias=False)
        optimizer = paceline.distributed(torch.optim.SGD(net.parameters(), lr=1.0), **options)
        norm = torch.tensor(0.0)
        for sign in (1.0, -1.0):
            optimizer.zero_grad()
            with optimizer.accumulate():
                (sign * 100.0 * net(torch.ones(200))).sum().backward()
            optimizer.clip_gradients(0.5, norm_type)
            norm = net.weight.grad.norm(norm_type) if net.weight.grad is not None else norm
            optimizer.step()
        return norm.item()

    assert run_job(tmp_path, own, workers=2, servers=len(shares) or 1, shares=shares) == pytest.approx([0.5, 0.5])
    told = capsys.readouterr().err
    assert told.count("each worker clips its own gradients, not their mean") == 2
    assert told.count(reason) == 2


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize(("dtype", "gradient"), [(torch.float16, 1000.0), (torch.float32, 1e20)])
def test_gradients_whose_norm_overflows_are_clipped_and_not_refused(
    tmp_path: Path, dtype: torch.dtype, gradient: float, servers: int
) -> None:
    def stepped(worker: Session) -> tuple[float, float, int]:
        net = nn.Linear(100, 100, bias=False).to(dtype)
        nn.init.zeros_(net.weight)
        optimizer = paceline.distributed(torch.optim.SGD(net.parameters(), lr=1.0), model=net)
        net(torch.ones(1, 100, dtype=dtype)).sum().mul(gradient if worker.rank else 1.0).backward()
        norm = optimizer.clip_gradients(1.0).item()
        optimizer.step()
        with optimizer.snapshot():
            return norm, -net.weight[0, 0].item(), optimizer.num_refused

    first, second = run_job(tmp_path, stepped, workers=2, servers=servers)
    assert [first[0], second[0]] == [100.0, math.inf]
    for _, step, num_refused in (first, second):
        assert (step, num_refused) == (pytest.approx(0.01, rel=0.01), 0)


@pytest.mark.parametrize("strategy", ["bsp", "all-reduce"])
@pytest.mark.parametrize("element", [math.nan, math.inf])
def test_an_element_that_is_zeroed_takes_no_other_along_as_the_norm_is_computed(
    tmp_path: Path, strategy: str, element: float
) -> None:
    def stepped(worker: Session) -> list[float]:
        net = nn.Linear(4, 1, bias=False)
        nn.init.zeros_(net.weight)
        optimizer = paceline.distributed(
            torch.optim.SGD(net.parameters(), lr=1.0), model=net, strategy=strategy, nonfinite="zero"
        )
        net(torch.tensor([element if worker.rank else 1.0, 2.0 + worker.rank, 1.0, 1.0])).backward()
        optimizer.clip_gradients(100.0)
        optimizer.step()
        with optimizer.snapshot():
            return (-net.weight[0]).tolist()

    assert run_job(tmp_path, stepped, workers=2) == [[0.5, 2.5, 1.0, 1.0]] * 2


def test_servers_refuse_a_norm_that_they_cannot_clip_to() -> None:
    spec = TableSpec("w", (Segment("w", (2,)),), "float32", SGD(lr=0.1), "bsp", "samples", "reject")
    hyper = spec.rule.groups
    assert without_clip(with_clip(hyper, 2.0)) == (hyper, 2.0)
    for max_norm, problem in ((2.0, ""), (0.0, "a norm of 0.0"), (float("nan"), "a norm of nan")):
        assert problem in push_problem(spec, push(with_clip(hyper, max_norm)))
        assert bool(push_problem(spec, push(with_clip(hyper, max_norm)))) == bool(problem)
    textual = ({**hyper[0], "clip_norm": (1.0, 2.0)},)
    assert "a norm of nan" in push_problem(spec, push(textual))
    for other in (replace(spec, consistency="ssp:3"), replace(spec, scale="sum")):
        assert "is to be clipped, but 'w' has" in push_problem(other, push(with_clip(hyper, 2.0)))


def push(hyper: Any) -> PushFrame:
    return PushFrame(Push(PushId(0, 0, 0, 0), "w", 0, 0), 1.0, (), hyper, screened=True)


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@pytest.mark.usefixtures("joined")
def test_parameters_without_elements_have_no_part_in_a_norm(norm_type: float) -> None:
    parameters = [nn.Parameter(torch.zeros(size)) for size in (0, 1)]
    optimizer = paceline.distributed(torch.optim.SGD(parameters, lr=1.0), name=f"without-elements-{norm_type}")
    sum(each.sum() for each in parameters).backward()
    assert optimizer.clip_gradients(0.5, norm_type).item() == 1.0
    optimizer.step()
    assert parameters[1].item() == pytest.approx(-0.5, rel=1e-5)


@pytest.mark.usefixtures("joined")
def test_not_finite_norms_are_raised_if_wanted() -> None:
    net = nn.Linear(1, 1)
    optimizer = paceline.distributed(torch.optim.SGD(net.parameters(), lr=1.0), name="infinite")
    net(torch.tensor([float("inf")])).backward()
    with pytest.raises(RuntimeError, match="non-finite"):
        optimizer.clip_gradients(1.0, error_if_nonfinite=True)
