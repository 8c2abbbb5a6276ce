"""What `paceline plan` expects of memory, beside the peak of processes that do it.

    python benchmarks/plan.py --workers 2

Three small models with momentum SGD in float32: alone, under a parameter server over shared memory and over tcp, and
under the strategies without a server: all-reduce, fsdp, a pipeline of two stages and layers split over two ranks.
What a process takes for a tiny model of the same kind (the interpreter, torch, its libraries) is measured in the same
run and taken off, as it is from the plan. Memory that several processes map counts in equal parts on each (PSS).
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Final

import torch
from cyclopts import App, Parameter
from measuring import machine, print_json, progress
from memory import GIVE_BACK, MB, server_pid, watch
from msgspec.structs import replace
from plan_models import WORK, WithLoss, Work
from plan_worker import ALONE, MICRO_BATCHES, SIZES
from turns import BENCHMARKS, PlayFailed, Stage

from paceline.tools.plan.estimate import Estimate, PlannedTask, estimate
from paceline.tools.plan.machine import Machines, parse_device, parse_link
from paceline.tools.plan.measuring import Sample, measured_model
from paceline.tools.plan.model import TrainingRecipe
from paceline.tools.plan.strategy import PlannedStrategy, parse_strategy

TRANSPORTS: Final = ("shm", "tcp")  # of a parameter server
STRATEGIES: Final = (ALONE, *TRANSPORTS, "all-reduce", "fsdp", "pipeline:2", "tensor:2")
NOISE_BYTES: Final = 20 * MB  # what two processes that do the same may differ by; roles that need less say nothing

app = App(name="plan.py", help="Compare planned with measured memory.", help_format="plaintext")


@dataclass(frozen=True, slots=True)
class Found:
    """One role of one model under one strategy, in bytes beyond those of a tiny model."""

    model: str
    strategy: str
    role: str
    planned: float
    measured: float

    @property
    def error(self) -> float:
        """By which share the plan is more than what was measured."""
        return self.planned / self.measured - 1


@app.default
def plan(
    *,
    workers: Annotated[int, Parameter(alias="-n")] = 2,
    models: Annotated[tuple[str, ...], Parameter(negative="")] = tuple(WORK),
    strategies: Annotated[tuple[str, ...], Parameter(negative="")] = STRATEGIES,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Train each model under each strategy; print each role's planned and measured peak.

    Parameters
    ----------
    workers
        Number of workers, except alone.
    models
        Which ones: perceptron, transformer, convolution.
    strategies
        Which ones: single, shm, tcp (both a parameter server), or what `paceline plan` and `paceline run` both know.
    json
        Print only one line of JSON on stdout.
    """
    try:
        found = [one for strategy in strategies for one in compare(strategy, models, workers)]
    except PlayFailed as failure:
        print(failure, file=sys.stderr)
        return 1
    if not json:
        print(f"momentum SGD in float32, {workers} workers; {machine()}")
        for one in found:
            print(
                f"  {one.strategy:10} {one.model:12} {one.role:7} planned {one.planned / MB:5.0f} MB, measured "
                f"{one.measured / MB:5.0f} MB, {one.error:+.1%}"
            )
    errors = {f"{one.strategy}.{one.model}.{one.role}_error": one.error for one in found}
    print_json({"name": "plan", "workers": workers, **errors, "worst": max(map(abs, errors.values()))})
    return 0


def compare(strategy: str, models: tuple[str, ...], num_workers: int) -> Iterator[Found]:
    """Yield what was planned and measured of each model's roles."""
    for name in models:
        if strategy.startswith("tensor") and not hasattr(WORK[name].make(), "tensor_plan"):
            continue
        progress(f"Measuring a tiny {name} under {strategy}, then the whole one")
        tiny, whole = (planned_bytes(strategy, size, name, num_workers) for size in SIZES)
        below, above = (peaks(strategy, size, name, num_workers) for size in SIZES)
        for role in (role for role in whole if whole[role] > NOISE_BYTES):
            yield Found(name, strategy, role, whole[role] - tiny[role], above[role] - below[role])


def planned_bytes(strategy: str, size: str, name: str, num_workers: int) -> dict[str, float]:
    """Return the peak of each role by the plan."""
    count = 1 if strategy == ALONE else num_workers
    chosen = parse_strategy("parameter-server:1" if strategy in TRANSPORTS else strategy, count)
    found = planned(name, SIZES[size][name], chosen, count, "10gbit" if strategy == "tcp" else "shm")
    return {role.name: role.memory.total for role in found.roles}


def planned(
    name: str,
    work: Work,
    strategy: PlannedStrategy,
    num_devices: int,
    link: str,
    computing_s: float | None = None,
    memory_bytes_per_s: float | None = None,
) -> Estimate:
    """Return what the plan says of a model on this machine.

    `computing_s` is what one device takes for a worker's samples, in micro-batches for a pipeline. `memory_bytes_per_s`
    is what its memory reads and writes.
    """
    with torch.device("meta"):
        module = WithLoss(work.make())
    recipe = TrainingRecipe("fp32", "momentum")
    model = measured_model(name, module, Sample.parse(work.sample), work.batch, recipe.weight_bytes)
    host, between = parse_device("cpu:1TB"), parse_link(link, "--link")
    if memory_bytes_per_s is not None:
        host = replace(host, memory_bytes_per_s=memory_bytes_per_s)
    machines = Machines(
        device=host,
        num_devices=num_devices,
        devices_per_machine=num_devices,
        link=between,
        network=between,
        server_device=host,
        utilisation=1.0,
    )
    batch, compute_s = strategy.data * work.batch, None if computing_s is None else strategy.data * computing_s
    task = PlannedTask(model=model, batch=batch, recipe=recipe, compute_s=compute_s, accumulated_s=compute_s)
    return estimate(task, strategy, machines, MICRO_BATCHES if strategy.pipeline > 1 else None)


def peaks(strategy: str, size: str, name: str, num_workers: int) -> dict[str, float]:
    """Train and return the peak of each role: of workers the highest."""
    script = [str(BENCHMARKS / "plan_worker.py"), "{stage}", size, name, strategy]
    how = ["--transport" if strategy in TRANSPORTS else "--strategy", strategy]
    options = ["-m", "paceline", "run", "-n", str(num_workers), *how, "--quiet"]
    command = [sys.executable, *(() if strategy == ALONE else options), *script]
    with Stage() as stage:
        side = stage.start("paceline", command, 1 if strategy == ALONE else num_workers, GIVE_BACK)
        side.ask("step", 1)
        servers = [server_pid(side)] if strategy in TRANSPORTS else []
        found = [peak.pss for peak in watch(side, [*side.pids, *servers])]
    if not servers:
        return {"worker": max(found)}
    return {"worker": max(found[:-1]), "server": found[-1]}


if __name__ == "__main__":
    sys.exit(app())
