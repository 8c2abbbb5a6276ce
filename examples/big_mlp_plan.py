"""What the big perceptron needs of a worker's memory under each strategy, as `paceline plan` computes it."""

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.job.strategy import Distribution
from paceline.tools.plan.estimate import PlannedTask as PlannedTask
from paceline.tools.plan.estimate import estimate
from paceline.tools.plan.machine import Machines, parse_device, parse_link
from paceline.tools.plan.model import Model, PlannedLayer, TrainingRecipe
from paceline.tools.plan.strategy import parse_strategy

MEGA = 1e6
NUMBER_BYTES = 4
# What is worth trying where the one that was asked for does not fit; {n} is the number of workers.
OTHERS = ("pipeline:{n}", "tensor:{n}", "fsdp", "parameter-server")


@dataclass(frozen=True, slots=True)
class Task:
    """The model's width and blocks, and the samples of a step."""

    width: int
    num_blocks: int
    batch: int

    def model(self) -> Model:
        """Return the model as the plan sees it: blocks of two layers each."""
        width = self.width
        blocks = [
            PlannedLayer(
                f"block {index}",
                num_parameters=2 * width * (width + 1),
                flops=4 * width**2,
                split_parameters=2 * width**2 + width,
                kept_bytes=NUMBER_BYTES * width,
                split_bytes=NUMBER_BYTES * width,
                output_bytes=NUMBER_BYTES * width,
                largest_parameters=width**2,
                num_all_reduces=1,
            )
            for index in range(self.num_blocks)
        ]
        return Model("a perceptron", tuple(blocks), input_bytes=NUMBER_BYTES * width)


def need_bytes(task: Task, distribution: Distribution, num_workers: int) -> float:
    """Return the memory that the neediest worker takes: weights, gradients, optimizer state and activations.

    Raises:
        UsageError: the model or the workers cannot be cut like this.
    """
    device = parse_device("cpu:1TB")
    network = parse_link("10gbit", "link")
    machines = Machines(device, num_workers, num_workers, network, network, device, utilisation=0.4)
    planned = PlannedTask(model=task.model(), batch=task.batch, recipe=TrainingRecipe("fp32", "adam"))
    strategy = parse_strategy(_as_planned(distribution, num_workers), num_workers)
    return estimate(planned, strategy, machines).worker.memory.total


def refuse_unless_it_fits(task: Task, distribution: Distribution, num_workers: int, cap_bytes: float) -> float:
    """Return what a worker needs; end with what would fit where that is more than it may take."""
    needed = need_bytes(task, distribution, num_workers)
    if needed <= cap_bytes:
        return needed
    fitting = [f"{text} ({size / MEGA:.0f} MB)" for text, size in _others(task, num_workers) if size <= cap_bytes]
    advice = f"Take --strategy {' or '.join(fitting)}" if fitting else "Take more workers"
    raise SystemExit(
        f"This model does not fit: on {num_workers} worker(s) each needs {needed / MEGA:.0f} MB under "
        f"{_as_planned(distribution, num_workers)}, and --cap allows {cap_bytes / MEGA:.0f} MB. {advice}, or a larger "
        "--cap."
    )


def _others(task: Task, num_workers: int) -> Iterator[tuple[str, float]]:
    """Yield what other strategies need, as far as the model can be cut so."""
    for text in OTHERS:
        named = text.format(n=num_workers)
        try:
            yield named, need_bytes(task, Distribution.parse(named), num_workers)
        except UsageError:
            continue


def _as_planned(distribution: Distribution, num_workers: int) -> str:
    """Return a strategy as `paceline plan` takes it; those that step by themselves hold as much as under all-reduce."""
    axes = {"pipeline": distribution.pipeline, "tensor": distribution.tensor}
    words = [f"{name}:{size}" for name, size in axes.items() if size > 1]
    data = distribution.data or ("" if words else "parameter-server")
    if data == "parameter-server":
        words.append("parameter-server:1")
    elif data == "fsdp":
        words.append("fsdp")
    elif data and num_workers > distribution.ranks_per_replica:
        words.append("all-reduce")
    return "+".join(words) or "single"
