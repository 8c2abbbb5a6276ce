"""`paceline plan`: what fits, what is sent and how long a step takes, before anything runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Annotated, Final

from cyclopts import Parameter
from msgspec import json as as_json  # which has null for what is not finite
from msgspec.structs import replace

from paceline.errors import UsageError
from paceline.observe.text_tables import print_tables
from paceline.tools.plan.estimate import Estimate, PlannedTask, Role, estimate
from paceline.tools.plan.intensity import busy_batch
from paceline.tools.plan.machine import DEVICES, Machines, parse_device, parse_link
from paceline.tools.plan.model import (
    COMPARED_DEVICES,
    KNOWN_MODELS,
    REFERENCE_MODEL,
    KnownModel,
    Model,
    OptimizerName,
    Precision,
    TrainingRecipe,
    Transformer,
    plain_model,
)
from paceline.tools.plan.quantities import (
    GB,
    LEAST,
    MB,
    MOST,
    in_bytes,
    in_count,
    in_seconds,
    parse_count,
    three_digits,
)
from paceline.tools.plan.search import explain, recommend, survey
from paceline.tools.plan.strategy import Schedule, parse_strategy

if TYPE_CHECKING:
    from rich.table import Table

_SHAPE: Final = ("--layers", "--hidden", "--heads", "--vocabulary", "--sequence")
_SEQUENCE: Final = 1024
_SUFFIX: Final = ".py"
_NAME_WIDTH: Final = len("parameter-server:9")
WELL_KNOWN_NOTE = (
    "ops: operations for a token, those of BERT-Base are 1. memory: 16 bytes a parameter, for weights and gradients in "
    "half precision, a float32 master copy and two moments; activations come on top. Then: how many devices hold that "
    "at least, when everything is sharded; 1 means that it fits one."
)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model.

    Parameters
    ----------
    parameters
        Number of parameters, such as 340M or 1.5B; with a shape, its layers are scaled to it.
    layers
        Number of blocks of a transformer, or of equal layers when only --parameters is given.
    hidden
        Width of a transformer.
    heads
        Number of attention heads.
    vocabulary
        Rows of its embedding.
    sequence
        Tokens of a sample. Default: 1024 for a transformer, else 1.
    fused_attention
        Attention by fused kernels, which keep no matrix of scores; always assumed for modules from a file.
    input
        Shape of one sample for a module from a file, without the batch: 3,224,224, or 128:ids for tokens.
    """

    parameters: str | None = None
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    vocabulary: int = 50257
    sequence: int | None = None
    fused_attention: Annotated[bool, Parameter(negative="")] = False
    input: str | None = None

    @property
    def has_numbers(self) -> bool:
        """Whether anything but the model's name is given."""
        numbers = (self.parameters, self.layers, self.hidden, self.heads, self.sequence)
        return any(number is not None for number in numbers)


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Training.

    Parameters
    ----------
    batch
        Samples of a step, of all replicas together. Default: one for each device.
    precision
        mixed: half-precision weights and gradients with a float32 master copy; fp32: float32 everywhere.
    optimizer
        Optimizer, which determines the state kept for each parameter.
    compute_s
        Measured seconds of a step of this batch on one device, without communication.
    accumulated_s
        The same, in as many micro-batches as pipelines take, whose gradients accumulate. Default: --compute-s.
    """

    batch: int | None = None
    precision: Precision = "mixed"
    optimizer: OptimizerName = "adam"
    compute_s: float | None = None
    accumulated_s: float | None = None

    def check(self) -> None:
        """Raise UsageError for numbers that cannot be."""
        for name, measured_s in (("--compute-s", self.compute_s), ("--accumulated-s", self.accumulated_s)):
            if measured_s is not None and not LEAST <= measured_s <= MOST:
                raise UsageError(f"{name} is {measured_s}, expected {LEAST:g} to {MOST:g} seconds.")


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """Machines.

    Parameters
    ----------
    device
        v100-16, v100-32, a100-40, a100-80, h100-80, cpu:24GB or NAME=BYTES; operations a second and bytes a second of
        its memory may follow the last two, as in mine=24GB:30T:900GB.
    devices
        Number of devices.
    devices_per_machine
        Number of devices of a machine. Default: all.
    link
        Between the devices of a machine: shm, nvlink-v100, nvlink-a100, nvlink-h100, pcie3, pcie4, 10gbit, or bytes a
        second and latency, such as 12.5GB:10us. Default: the link of the device.
    network
        Network between machines, for each device.
    server_device
        Device that servers run on.
    utilisation
        Share of its peak rate that a device reaches where its memory does not bound it.
    """

    device: str = "a100-80"
    devices: int = 1
    devices_per_machine: int | None = None
    link: str | None = None
    network: str = "100gbit"
    server_device: str = "cpu:256GB"
    utilisation: float = 0.4

    def machines(self) -> Machines:
        """Return the machines; raise UsageError for an unknown device or link."""
        device = parse_device(self.device)
        return Machines(
            device=device,
            num_devices=self.devices,
            devices_per_machine=self.devices if self.devices_per_machine is None else self.devices_per_machine,
            link=parse_link(self.link or device.link, "--link"),
            network=parse_link(self.network, "--network"),
            server_device=parse_device(self.server_device, "--server-device"),
            utilisation=self.utilisation,
        )


@dataclass(frozen=True, kw_only=True)
class StrategyOptions:
    """Strategies.

    Parameters
    ----------
    strategies
        Strategies to estimate, separated by commas: single, all-reduce, zero-1, zero-2, fsdp, parameter-server:SERVERS,
        colocated-server:SERVERS, pipeline:STAGES, tensor:RANKS, recompute, or several of these joined by +. Default:
        all that are possible.
    servers
        Number of servers where a strategy names none. Default: one for each machine.
    micro_batches
        Micro-batches of a replica. Default: up to four for each stage.
    schedule
        Schedule of a pipeline: gpipe or 1f1b.
    """

    strategies: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    servers: int | None = None
    micro_batches: int | None = None
    schedule: Schedule = "1f1b"

    def names(self) -> Iterator[str]:
        """Yield the named strategies, each once."""
        yield from dict.fromkeys(name.strip() for text in self.strategies for name in text.split(","))

    def num_servers(self, machines: Machines) -> int:
        """Return the number of servers; raise UsageError for numbers below 1."""
        if self.servers is not None and self.servers < 1:
            raise UsageError(f"--servers is {self.servers}, expected 1 or more.")
        if self.micro_batches is not None and self.micro_batches < 1:
            raise UsageError(f"--micro-batches is {self.micro_batches}, expected 1 or more.")
        return machines.num_machines if self.servers is None else self.servers


def task_of(name: str | None, model: ModelOptions, training: TrainingOptions, num_devices: int) -> PlannedTask:
    """Return the model, batch and recipe to plan for.

    Raises:
        UsageError: the model is not known or cannot be loaded, or a number is not valid.
    """
    batch = num_devices if training.batch is None else training.batch
    if batch < 1:
        raise UsageError(f"--batch is {batch}, expected 1 or more.")
    training.check()
    recipe = TrainingRecipe(training.precision, training.optimizer)
    return PlannedTask(
        model=_model(name, model, recipe, batch),
        batch=batch,
        recipe=recipe,
        compute_s=training.compute_s,
        accumulated_s=training.accumulated_s,
    )


def _model(name: str | None, options: ModelOptions, recipe: TrainingRecipe, batch: int) -> Model:
    if name is None:
        return _from_numbers(options, recipe)
    if options.has_numbers:
        raise UsageError(f"{name} has its own numbers; leave out --parameters and {', '.join(_SHAPE)}.")
    if ":" in name or name.endswith(_SUFFIX):
        return _from_file(name, options, recipe, batch)
    known = KNOWN_MODELS.get(name.lower())
    if known is None:
        raise UsageError(
            f"model '{name}' is not known. Expected {', '.join(KNOWN_MODELS)}, FILE.py:FUNCTION, or no name and "
            "--parameters or a shape (--layers, --hidden, --heads, --sequence)."
        )
    _refuse_input(options)
    return known.model(recipe.weight_bytes, fused_attention=options.fused_attention)


def _from_file(name: str, options: ModelOptions, recipe: TrainingRecipe, batch: int) -> Model:
    if options.input is None:
        raise UsageError(f"{name} needs --input, the shape of one sample: 3,224,224, or 128:ids for tokens.")
    from paceline.tools.plan.measuring import Sample, load_module, measured_model  # with torch, a second

    sample = Sample.parse(options.input)
    module = load_module(name)

    return measured_model(name, module, sample, batch, recipe.weight_bytes)


def _from_numbers(options: ModelOptions, recipe: TrainingRecipe) -> Model:
    _refuse_input(options)
    count = None if options.parameters is None else parse_count(options.parameters, "--parameters")
    layers, sequence = options.layers, options.sequence
    if options.hidden is None or options.heads is None or layers is None:
        if options.hidden is not None or options.heads is not None or count is None:
            raise UsageError(
                "expected a model: a name, FILE.py:FUNCTION, --parameters, or a shape: --layers, --hidden and --heads "
                "together."
            )
        return plain_model("a model", count, 1 if layers is None else layers, 1 if sequence is None else sequence)
    shape = Transformer(
        layers,
        options.hidden,
        options.heads,
        options.vocabulary,
        _SEQUENCE if sequence is None else sequence,
        keeps_scores=not options.fused_attention,
    )
    model = shape.model("a transformer", recipe.weight_bytes)
    return model if count is None else model.scaled_to(count)


def _refuse_input(options: ModelOptions) -> None:
    if options.input is not None:
        raise UsageError("--input is the sample of a module from a file; leave it out for any other model.")


_ACTIVATIONS_UNKNOWN = "Activations are unknown and not counted: give a shape or a file."


def plan(
    model: str | None = None,
    /,
    *,
    shape: Annotated[ModelOptions, Parameter(name="*")] = ModelOptions(),
    training: Annotated[TrainingOptions, Parameter(name="*")] = TrainingOptions(),
    machines: Annotated[MachineOptions, Parameter(name="*")] = MachineOptions(),
    look: Annotated[StrategyOptions, Parameter(name="*")] = StrategyOptions(),
    well_known: Annotated[bool, Parameter(negative="")] = False,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Estimate memory, traffic and time of each way to distribute a model, and recommend one.

    Parameters
    ----------
    model
        elmo, gpt, bert-tiny, bert-base, bert-large, gpt-2, megatron-lm, turing-nlg, gpt-3, or FILE.py:FUNCTION, which
        returns a torch.nn.Module; without it --parameters or a shape.
    shape
        The model by its numbers, or the shape of its input.
    training
        Batch, precision and optimizer.
    machines
        Devices and the links between them.
    look
        Strategies to estimate.
    well_known
        Print only the memory of well-known models, and the devices that have it.
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
        print(as_json.encode(plan_json(task, there, estimates, best, told)).decode())
    else:
        print_tables([plan_table(task, there, estimates)], told)
    return 0


def _estimates(task: PlannedTask, machines: Machines, look: StrategyOptions) -> list[Estimate]:
    """Return the estimates of the named strategies, or else of all that are possible."""
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
        models = {"bytes_per_parameter": recipe.state_bytes, "models": well_known_rows(recipe)}
        print(as_json.encode(models).decode())
    else:
        print_tables([well_known_table(recipe)], WELL_KNOWN_NOTE)
    return 0


def well_known_table(recipe: TrainingRecipe) -> Table:
    """Return the memory of the parameters of well-known models, and the devices that it fits."""
    table = _empty("Weights, gradients and optimizer state under mixed-precision Adam")
    table.add_column("model", header_style="dim", no_wrap=True)
    for heading in ("layers", "hidden", "params", "ops", "memory", *COMPARED_DEVICES):
        table.add_column(heading, justify="right", header_style="dim", no_wrap=True)
    for model in KNOWN_MODELS.values():
        shape = (str(model.shape.num_layers), str(model.shape.hidden), in_count(model.num_parameters))
        size = in_bytes(model.num_parameters * recipe.state_bytes)
        counts = [str(count) for count in _needed(model, recipe).values()]
        table.add_row(model.title, *shape, three_digits(_computation(model)), size, *counts)
    return table


def _computation(model: KnownModel) -> float:
    """Return the operations for a token, beside those of the model that all are compared with."""
    return model.flops_per_token / KNOWN_MODELS[REFERENCE_MODEL].flops_per_token


def well_known_rows(recipe: TrainingRecipe) -> list[dict[str, object]]:
    """Return the same as values: bytes, and the number of devices of each kind that hold them."""
    return [
        {
            "model": model.title,
            "num_layers": model.shape.num_layers,
            "hidden": model.shape.hidden,
            "num_parameters": model.num_parameters,
            "relative_computation": _computation(model),
            "state_bytes": model.num_parameters * recipe.state_bytes,
            "devices_needed": _needed(model, recipe),
        }
        for model in KNOWN_MODELS.values()
    ]


def _needed(model: KnownModel, recipe: TrainingRecipe) -> dict[str, int]:
    """Return the number of devices of each kind that hold the model, sharded evenly."""
    size = model.num_parameters * recipe.state_bytes
    return {name: ceil(size / DEVICES[name].memory_bytes) for name in COMPARED_DEVICES}


def plan_table(task: PlannedTask, machines: Machines, estimates: Sequence[Estimate]) -> Table:
    """Return memory, traffic and time of each strategy, with a row for each of its roles."""
    title = (
        f"{task.model.name}: {in_count(task.model.num_parameters)} parameters, {task.recipe.precision} "
        f"{task.recipe.optimizer}, batch {task.batch}, on {machines.num_devices} x {machines.device}"
    )
    unit, size = ("GB", GB) if any(role.memory.total >= GB for one in estimates for role in one.roles) else ("MB", MB)
    table = _empty(f"{title}; in {unit}")
    table.add_column("strategy", header_style="dim", overflow="fold", min_width=_NAME_WIDTH)
    has_bubbles = any(one.bubble_share for one in estimates)
    bubble = ("idle",) if has_bubbles else ()
    for heading in ("weights", "grads", "optim", "activ", "bufs", "all", "fits", "sent", *bubble, "step"):
        table.add_column(heading, justify="right", header_style="dim", no_wrap=True)
    for one in estimates:
        idle = (f"{one.bubble_share:.0%}",) if has_bubbles else ()
        paced = (_of_unit(one.sent.total, size), *idle, in_seconds(one.step.total))
        for role in one.roles:
            is_worker = role is one.worker
            name = str(one.strategy).replace("+", "\n+") if is_worker else f"  {role.name}"
            table.add_row(name, *_cells(role, size), *(paced if is_worker else ()))
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
        "busy_batch": busy_batch(task.model, task.recipe, machines) if task.model.flops else None,
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
    sizes = [_of_unit(size, unit) for size in (*role.memory.by_part().values(), role.memory.total)]
    return [*sizes, "yes" if role.fits else "no"]


def _of_unit(size_bytes: float, unit: float) -> str:
    return three_digits(round(size_bytes / unit, 3))


def _empty(title: str) -> Table:
    from rich.table import Table

    return Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0))
