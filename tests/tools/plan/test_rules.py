"""The plan offers nothing that `paceline.parallelize` refuses: ties, stages without parameters, layers of all kinds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.model_parallel.layers import balanced, layers_of
from paceline.model_parallel.tensor_plan import plan_for, require_splittable
from paceline.tools.plan.estimate import PlannedTask, check_model, estimate, with_micro_batches
from paceline.tools.plan.machine import Machines, parse_device, parse_link
from paceline.tools.plan.measuring import Sample, measured_model
from paceline.tools.plan.model import Model, TrainingRecipe, Transformer
from paceline.tools.plan.search import survey
from paceline.tools.plan.strategy import PlannedStrategy


class Scaled(nn.Linear):
    """A linear layer with a forward of its own."""


class Blocks(nn.Module):
    """A model that says which layers it has."""

    def __init__(self, layer: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(layer(8, 16), nn.GELU(), layer(16, 8)) for _ in range(3))
        self.head = nn.Linear(8, 8)

    def layers(self) -> list[nn.Module]:
        return [*self.blocks, nn.Tanh(), self.head]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers():
            x = layer(x)
        return x


class WithLoss(nn.Module):
    """A model with its loss around it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).square().mean()


class Alone(Blocks):
    """A model whose layers cannot be told apart."""

    layers = None  # pyright: ignore[reportAssignmentType]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[2](self.blocks[1](self.blocks[0](x))))


def tied(first: int, last: int) -> nn.Module:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    model[last].weight = model[first].weight
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "activations": lambda: nn.Sequential(nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.ReLU(), nn.Linear(8, 8), nn.ReLU()),
    "nested": lambda: nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Sequential(nn.Linear(8, 8))),
    "tied ends": lambda: tied(0, 5),
    "tied inside": lambda: tied(1, 3),
    "blocks": Blocks,
    "subclasses": lambda: Blocks(Scaled),
    "with loss": lambda: WithLoss(tied(4, 5)),
    "no row": Alone,
}


def planned(make: Callable[[], nn.Module]) -> Model:
    with torch.device("meta"):
        module = make()
    return measured_model("a model", module, Sample.parse("8"), 4, 4)


def offers(model: Model, strategy: PlannedStrategy) -> bool:
    try:
        check_model(strategy, model)
    except UsageError:
        return False
    return True


def accepts(act: Callable[[], object]) -> bool:
    try:
        act()
    except UsageError:
        return False
    return True


@pytest.mark.parametrize("name", MODELS)
def test_a_plan_offers_what_parallelize_does(name: str) -> None:
    module, model = MODELS[name](), planned(MODELS[name])
    core = module.model if isinstance(module, WithLoss) else module

    def cut(num_stages: int) -> None:
        layers = layers_of(core)
        balanced(layers, [float(layer.num_parameters) for layer in layers], num_stages)

    for number in range(2, 8):
        assert offers(model, PlannedStrategy(pipeline=number)) == accepts(lambda number=number: cut(number)), number
        splits = accepts(lambda number=number: require_splittable(core, plan_for(core, None, number), number))
        assert offers(model, PlannedStrategy(tensor=number)) <= splits, number
    assert offers(model, PlannedStrategy(recompute=True)) == accepts(lambda: layers_of(core))


def test_stages_of_a_plan_begin_where_stages_may() -> None:
    model = planned(MODELS["tied inside"])
    assert model.rules.starts == (1, 4, 5)
    with pytest.raises(UsageError, match="6 layers, which make 4 stages at most"):
        check_model(PlannedStrategy(pipeline=5), model)
    with pytest.raises(UsageError, match="a Alone cannot be split: expected a"):
        check_model(PlannedStrategy(pipeline=2), planned(Alone))


def machines(num_devices: int) -> Machines:
    link, host = parse_link("10gbit", "--link"), parse_device("cpu:10GB:1G")
    return Machines(
        device=host,
        num_devices=num_devices,
        devices_per_machine=num_devices,
        link=link,
        network=link,
        server_device=host,
        utilisation=1.0,
    )


def test_what_is_not_to_be_had_is_not_looked_at() -> None:
    shape = Transformer(num_layers=6, hidden=64, num_heads=4, vocabulary=1000, sequence=16)
    task = PlannedTask(model=shape.model("small", number_bytes=4), batch=16, recipe=TrainingRecipe("fp32", "adam"))
    found = [one.strategy for one in survey(task, machines(4), 1, "1f1b")]
    assert found
    assert not [one for one in found if one.pipeline > 1 and one.joint == "fsdp"]
    with pytest.raises(UsageError, match="3 micro-batches cannot keep 4 stages busy"):
        with_micro_batches(PlannedStrategy(pipeline=4), 12, 3)
    assert with_micro_batches(PlannedStrategy(pipeline=4, schedule="gpipe"), 12, 3).num_micro_batches == 3


def test_the_head_of_a_transformer_has_a_matrix_of_its_own_in_a_pipeline() -> None:
    shape = Transformer(num_layers=2, hidden=64, num_heads=4, vocabulary=100_000, sequence=16)
    model = shape.model("small", number_bytes=4)
    assert model.untied().num_parameters == model.num_parameters + 64 * 100_000
    task = PlannedTask(model=model, batch=16, recipe=TrainingRecipe("fp32", "adam"))
    last = estimate(task, PlannedStrategy(pipeline=2), machines(2)).worker.memory.weights
    apart = estimate(
        replace(task, model=model.untied()), PlannedStrategy(pipeline=2), machines(2)
    ).worker.memory.weights
    assert last == apart >= 4 * 64 * 100_000
