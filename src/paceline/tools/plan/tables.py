"""Output of a plan: tables to read, and the same numbers as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING

from paceline.tools.plan.estimate import Estimate, PlannedTask, Role
from paceline.tools.plan.machine import DEVICES, Machines
from paceline.tools.plan.model import TrainingRecipe
from paceline.tools.plan.quantities import GB, MB, in_billions, in_count, in_gb, in_seconds, three_digits
from paceline.tools.plan.transformer import COMPARED_DEVICES, KNOWN_MODELS, KnownModel

if TYPE_CHECKING:
    from rich.table import Table

WELL_KNOWN_NOTE = (
    "16 bytes a parameter: weights and gradients in half precision, a float32 master copy and two moments. Activations "
    "come on top. 'over 4' does not fit one device, and takes 4 at least when everything is sharded."
)


def well_known_table(recipe: TrainingRecipe) -> Table:
    """Return the well-known models: what their parameters need, and on which devices that fits."""
    table = _empty("Weights, gradients and optimizer state under mixed-precision Adam")
    table.add_column("model", header_style="dim")
    for heading in ("parameters", "memory", *COMPARED_DEVICES):
        table.add_column(heading, justify="right", header_style="dim", no_wrap=True)
    for model in KNOWN_MODELS.values():
        cells = ["fits" if count == 1 else f"over {count}" for count in _needed(model, recipe).values()]
        size = in_gb(model.num_parameters * recipe.state_bytes)
        table.add_row(model.title, in_billions(model.num_parameters), size, *cells)
    return table


def well_known_rows(recipe: TrainingRecipe) -> list[dict[str, object]]:
    """Return the same as values: bytes, and how many of each device hold them."""
    return [
        {
            "model": model.title,
            "num_parameters": model.num_parameters,
            "state_bytes": model.num_parameters * recipe.state_bytes,
            "devices_needed": _needed(model, recipe),
        }
        for model in KNOWN_MODELS.values()
    ]


def _needed(model: KnownModel, recipe: TrainingRecipe) -> dict[str, int]:
    """Return how many of each device hold it, when everything is sharded evenly."""
    size = model.num_parameters * recipe.state_bytes
    return {name: ceil(size / DEVICES[name].memory_bytes) for name in COMPARED_DEVICES}


def plan_table(task: PlannedTask, machines: Machines, estimates: Sequence[Estimate]) -> Table:
    """Return what each strategy needs and how long it takes, a row for each of its roles."""
    title = (
        f"{task.model.name}: {in_count(task.model.num_parameters)} parameters, {task.recipe.precision} "
        f"{task.recipe.optimizer}, batch {task.batch}, on {machines.num_devices} x {machines.device}"
    )
    unit, size = ("GB", GB) if any(role.memory.total >= GB for one in estimates for role in one.roles) else ("MB", MB)
    table = _empty(f"{title}; in {unit}")
    table.add_column("strategy", header_style="dim", overflow="fold")
    table.add_column("role", header_style="dim", no_wrap=True)
    for heading in ("weights", "grads", "optim", "activ", "buffers", "all", "fits", "sent", "bubble", "step"):
        table.add_column(heading, justify="right", header_style="dim", no_wrap=True)
    for one in estimates:
        for role in one.roles:
            is_first = role is one.worker
            paced = (three_digits(one.sent.total / size), f"{one.bubble_share:.0%}", in_seconds(one.step.total))
            table.add_row(
                str(one.strategy) if is_first else "", role.name, *_cells(role, size), *(paced if is_first else ())
            )
    return table


def plan_json(
    task: PlannedTask, machines: Machines, estimates: Sequence[Estimate], best: Estimate | None, told: str
) -> object:
    """Return the plan as one JSON object."""
    return {
        "model": task.model.name,
        "num_parameters": task.model.num_parameters,
        "num_layers": len(task.model.layers),
        "flops_per_sample": task.model.flops,
        "batch": task.batch,
        "precision": task.recipe.precision,
        "optimizer": task.recipe.optimizer,
        "bytes_per_parameter": task.recipe.state_bytes,
        "activations_known": task.model.knows_activations,
        "device": machines.device.name,
        "num_devices": machines.num_devices,
        "strategies": [_estimate_json(one) for one in estimates],
        "recommended": None if best is None else str(best.strategy),
        "told": told,
    }


def _estimate_json(one: Estimate) -> dict[str, object]:
    strategy = one.strategy
    return {
        "strategy": str(strategy),
        "data": strategy.data,
        "pipeline": strategy.pipeline,
        "tensor": strategy.tensor,
        "micro_batches": strategy.num_micro_batches,
        "fits": one.fits,
        "roles": [
            {
                "role": role.name,
                "count": role.count,
                "device": role.device.name,
                "fits": role.fits,
                "memory_bytes": {**role.memory.by_part(), "total": role.memory.total},
            }
            for role in one.roles
        ],
        "sent_bytes": {
            "data": one.sent.data,
            "pipeline": one.sent.pipeline,
            "tensor": one.sent.tensor,
            "total": one.sent.total,
        },
        "seconds": {
            "compute": one.step.compute,
            "bubble": one.step.bubble,
            "communicate": one.step.communicate,
            "step": one.step.total,
        },
        "bubble_share": one.bubble_share,
    }


def _cells(role: Role, unit: float) -> list[str]:
    sizes = [three_digits(size / unit) for size in (*role.memory.by_part().values(), role.memory.total)]
    return [*sizes, "yes" if role.fits else "no"]


def _empty(title: str) -> Table:
    from rich.table import Table

    return Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
