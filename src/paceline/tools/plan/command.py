"""`paceline plan`: what fits, what is sent and how long a step takes, before anything runs."""

from __future__ import annotations

import json as json_format
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from paceline.tools.plan.estimate import Estimate, PlannedTask, estimate
from paceline.tools.plan.machine import Machines
from paceline.tools.plan.model import TrainingRecipe
from paceline.tools.plan.options import MachineOptions, ModelOptions, StrategyOptions, TrainingOptions, task_of
from paceline.tools.plan.search import explain, recommend, survey
from paceline.tools.plan.strategy import parse_strategy
from paceline.tools.plan.tables import WELL_KNOWN_NOTE, plan_json, plan_table, well_known_rows, well_known_table

if TYPE_CHECKING:
    from rich.table import Table

_ACTIVATIONS_UNKNOWN = "Activations are not known and not counted: give a shape or a file."


def plan(
    model: str | None = None,
    /,
    *,
    shape: Annotated[ModelOptions, Parameter(name="*")] = ModelOptions(),  # noqa: B008 - it is frozen
    training: Annotated[TrainingOptions, Parameter(name="*")] = TrainingOptions(),  # noqa: B008 - it is frozen
    machines: Annotated[MachineOptions, Parameter(name="*")] = MachineOptions(),  # noqa: B008 - it is frozen
    look: Annotated[StrategyOptions, Parameter(name="*")] = StrategyOptions(),  # noqa: B008 - it is frozen
    well_known: Annotated[bool, Parameter(negative="")] = False,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Say what each way to distribute a model needs and takes, and which one to choose.

    Parameters
    ----------
    model
        bert-large, gpt-2, turing-nlg, gpt-3, or FILE.py:FUNCTION, which returns a torch.nn.Module; without it
        --parameters or a shape.
    shape
        The model by its numbers, or what it takes.
    training
        How it is trained.
    machines
        What there is to train on.
    look
        Which strategies to look at.
    well_known
        Print what well-known models need and which devices have it, and nothing else.
    json
        Print one JSON object instead of a table.
    """
    if well_known:
        return _tell_well_known(json=json)
    there = machines.machines()
    task = task_of(model, shape, training, there.num_devices)
    estimates = _estimates(task, there, look)
    best, told = recommend(estimates), explain(task, there, estimates)
    if not task.model.knows_activations:
        told = f"{told} {_ACTIVATIONS_UNKNOWN}"
    if json:
        print(json_format.dumps(plan_json(task, there, estimates, best, told)))
    else:
        _print(plan_table(task, there, estimates), told)
    return 0


def _estimates(task: PlannedTask, machines: Machines, look: StrategyOptions) -> list[Estimate]:
    """Return the estimates of the strategies that are named, as they are; otherwise of all that are possible."""
    num_servers = look.num_servers(machines)
    named = [parse_strategy(name, machines.num_devices) for name in look.names()]
    if not named:
        return survey(task, machines, num_servers, look.schedule, look.micro_batches)
    return [
        estimate(task, replace(strategy, schedule=look.schedule), machines, look.micro_batches) for strategy in named
    ]


def _tell_well_known(*, json: bool) -> int:
    recipe = TrainingRecipe("mixed", "adam")
    if json:
        print(json_format.dumps({"bytes_per_parameter": recipe.state_bytes, "models": well_known_rows(recipe)}))
    else:
        _print(well_known_table(recipe), WELL_KNOWN_NOTE)
    return 0


def _print(table: Table, told: str) -> None:
    from rich.console import Console

    console = Console()
    console.print(table)
    console.print()
    console.print(told, highlight=False)
