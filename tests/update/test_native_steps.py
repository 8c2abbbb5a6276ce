"""Steps of the C library are torch's to the last bit, or torch takes them."""

from __future__ import annotations

from ctypes import CDLL
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from paceline.core.partition import Range
from paceline.errors import ProtocolBug
from paceline.update import SGD, Adam, AdamW, native_steps
from paceline.update.kernels import Kernel, SGDKernel
from paceline.update.named_rules import resolve
from paceline.update.native_steps import FUNCTIONS, LIBRARY, Addends, NativeSteps, StepMemory, differences
from paceline.update.rows.native_ops import load_library
from paceline.update.rules import RuleSpec
from paceline.update.shard import Contribution, Shard
from paceline.update.table import Segment, TableSpec

from .tables import table


@pytest.fixture
def library() -> CDLL:
    found = load_library(LIBRARY, FUNCTIONS)
    if isinstance(found, str) or not found.paceline_can_step():
        pytest.skip("this machine has no compiler, or a processor without these instructions")
    return found


@pytest.fixture
def steps(library: CDLL) -> NativeSteps:
    return NativeSteps(library, SGDKernel("torch.optim.SGD"))


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[StepMemory]:
    """The places of all steps that the library takes."""
    native_steps.steps_of(SGDKernel("torch.optim.SGD"), torch.empty(0))  # the library is tried out at its first use
    places: list[StepMemory] = []
    step = NativeSteps.step

    def noted(self: NativeSteps, place: StepMemory, *args: Any, **named: Any) -> bool:
        places.append(place)
        return step(self, place, *args, **named)

    monkeypatch.setattr(NativeSteps, "step", noted)
    return places


def spec_of(*sizes: int, fused: bool = False) -> TableSpec:
    rule = SGD(lr=0.1, momentum=0.9)
    groups = tuple({**group, "fused": fused} for group in rule.groups)
    return table(
        replace(rule, groups=groups), tuple(Segment(str(number), (size,)) for number, size in enumerate(sizes))
    )


def updated(spec: TableSpec, *pushes: Contribution) -> Tensor:
    shard = Shard(spec, Range(0, 0, spec.numel), rule=resolve(spec.rule, None))
    shard.store(torch.ones(spec.numel))
    for _ in range(3):
        shard.apply(pushes)
    return shard.values


def in_torch(monkeypatch: pytest.MonkeyPatch, spec: TableSpec, *pushes: Contribution) -> Tensor:
    with monkeypatch.context() as patch:
        patch.setattr(native_steps, "steps_library", lambda: None)
        return updated(spec, *pushes)


def test_they_are_those_of_this_torch_on_awkward_numbers(library: CDLL) -> None:
    assert list(differences(library)) == []
    assert list(differences(library, ends=True)) == []


@pytest.mark.parametrize("fused", [False, True])
def test_a_table_takes_them_and_has_the_bits_of_torch(
    fused: bool, steps: NativeSteps, taken: list[StepMemory], monkeypatch: pytest.MonkeyPatch
) -> None:
    del steps
    spec = spec_of(3, 200, 64, 61, fused=fused)
    pushes = [Contribution(torch.randn(spec.numel), count=count) for count in (1.0, 3.0, 0.3)]
    for scale in ("sum", "mean", "samples"):
        scaled = replace(spec, scale=scale)
        assert torch.equal(updated(scaled, *pushes), in_torch(monkeypatch, scaled, *pushes)), scale
    assert sum(place.length for place in taken) // 9 == spec.numel


def test_the_ends_of_tensors_are_left_to_torch_where_it_rounds_them_otherwise(
    library: CDLL, taken: list[StepMemory], monkeypatch: pytest.MonkeyPatch
) -> None:
    del library
    monkeypatch.setattr(native_steps, "_takes_ends", lambda _: False)
    spec = spec_of(3, 200, 64, 61, fused=True)
    pushes = [Contribution(torch.randn(spec.numel)) for _ in range(2)]
    assert torch.equal(updated(spec, *pushes), in_torch(monkeypatch, spec, *pushes))
    assert sum(place.length for place in taken) // 3 == 192 + 64


@pytest.mark.parametrize("rule", [Adam(lr=0.1), AdamW(lr=0.1, weight_decay=0.01)])
def test_fused_steps_of_adam_are_taken_and_others_left_to_torch(
    rule: RuleSpec, library: CDLL, taken: list[StepMemory], monkeypatch: pytest.MonkeyPatch
) -> None:
    del library
    for fused in (False, True):
        own = replace(rule, groups=tuple({**group, "fused": fused, "amsgrad": True} for group in rule.groups))
        spec = table(own, (Segment("a", (200,)), Segment("b", (70,))))
        pushes = [Contribution(torch.randn(270)) for _ in range(3)]
        assert torch.equal(updated(spec, *pushes), in_torch(monkeypatch, spec, *pushes))
        assert bool(taken) is fused


def test_where_gradients_are_missing_here_and_there_torch_takes_the_step(
    taken: list[StepMemory], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(70, 70)
    pushes = [Contribution(torch.randn(140)), Contribution(torch.randn(140), absent=frozenset([1]))]
    assert torch.equal(updated(spec, *pushes), in_torch(monkeypatch, spec, *pushes))
    assert taken == []


def test_gradients_that_lie_otherwise_in_memory_are_left_to_torch(
    taken: list[StepMemory], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, gradient = spec_of(70), torch.randn(140)[::2]
    found = updated(spec, Contribution(gradient))
    assert taken == []
    assert torch.equal(found, in_torch(monkeypatch, spec, Contribution(gradient)))


def test_a_sum_that_is_not_finite_is_noticed_wherever_it_is(steps: NativeSteps) -> None:
    numbers = {"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False}
    for bad in (torch.nan, torch.inf, -torch.inf):
        for at in (None, 0, 7, 8, 15, 17, 18):
            gradients = [torch.ones(19), torch.full((19,), 3e38)]
            if at is not None:
                gradients[at % 2][at] = bad
            place = StepMemory.of(0, torch.ones(19), [torch.ones(19)])
            given = Addends.of(gradients, (), 2.0)
            assert given is not None
            assert steps.step(place, given, (0, 1), numbers, fresh=False) is (at is None), at
    given = Addends.of([torch.full((19,), 3e38)] * 2, (), 2.0)  # finite, and the sum is not
    assert given is not None
    assert not steps.step(place, given, (0, 1), numbers, fresh=False)


def test_a_library_that_rounds_otherwise_is_not_used_which_is_told_once(
    steps: NativeSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    del steps
    told: list[str] = []
    in_torch = native_steps._step_in_torch

    def rounding_otherwise(kernel: Kernel, tensors: list[Tensor], *args: Any, **named: Any) -> None:
        in_torch(kernel, tensors, *args, **named)
        tensors[0][-1] = torch.nextafter(tensors[0][-1], torch.tensor(torch.inf))

    monkeypatch.setattr(native_steps, "_step_in_torch", rounding_otherwise)
    native_steps.steps_library.cache_clear()
    try:
        assert [native_steps.steps_library(told.append) for _ in range(2)] == [None, None]
    finally:
        native_steps.steps_library.cache_clear()
    assert len(told) == 1
    assert told[0].startswith(f"updates run in torch {torch.__version__}, which is slower")


def test_a_library_that_is_not_there_is_not_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(native_steps, "LIBRARY", tmp_path / "steps.c.so")
    native_steps.steps_library.cache_clear()
    assert native_steps.steps_library(told.append) is None
    (tmp_path / "steps.c.so").touch()
    native_steps.steps_library.cache_clear()
    assert native_steps.steps_library(told.append) is None
    native_steps.steps_library.cache_clear()
    assert [line.partition(":")[0] for line in told] == [
        "updates run in torch, which is slower, as their C library cannot be used"
    ]


@pytest.mark.parametrize("wrong", [torch.zeros(4, 4), torch.zeros(8)[::2], torch.zeros(4, dtype=torch.float64)])
def test_memory_that_does_not_fit_never_reaches_the_library(wrong: Tensor) -> None:
    with pytest.raises(ProtocolBug, match="one contiguous dimension of float32"):
        StepMemory.of(0, wrong, [])
    with pytest.raises(ProtocolBug, match="one contiguous dimension of float32"):
        StepMemory.of(0, torch.zeros(4), [wrong])
    assert Addends.of([torch.zeros(4), wrong], (), 1.0) is None
    with pytest.raises(ProtocolBug, match="4 values have 5 elements of a state"):
        StepMemory.of(0, torch.zeros(4), [torch.zeros(5)])
    with pytest.raises(ProtocolBug, match="2 gradients differ"):
        Addends.of([torch.zeros(4), torch.zeros(5)], (), 1.0)
