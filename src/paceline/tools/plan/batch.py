"""Division of a batch among replicas, and within a replica among micro-batches."""

from __future__ import annotations

from dataclasses import replace

from paceline.errors import UsageError
from paceline.tools.plan.model import Model
from paceline.tools.plan.strategy import PlannedStrategy

_MICRO_BATCHES_PER_STAGE = 4  # from here on the bubble is small


def with_micro_batches(strategy: PlannedStrategy, batch: int, wanted: int | None) -> PlannedStrategy:
    """Return the strategy with its micro-batches: those wanted, or for a pipeline up to four for each stage.

    Args:
        strategy: of which a replica gets `batch` / replicas.
        batch: samples of a step, of all replicas together.
        wanted: micro-batches of a replica; None leaves it open, and then they divide its samples.

    Raises:
        UsageError: replicas or micro-batches do not divide the batch.
    """
    if batch % strategy.data:
        raise UsageError(
            f"strategy '{strategy}': a batch of {batch} cannot be shared evenly by {strategy.data} replicas; "
            f"choose a --batch that {strategy.data} divides."
        )
    if wanted is not None and wanted < strategy.pipeline and strategy.schedule == "1f1b":
        raise UsageError(
            f"strategy '{strategy}': {wanted} micro-batches cannot keep {strategy.pipeline} stages busy in turn, as "
            "1f1b does: choose more --micro-batches, or --schedule gpipe."
        )
    samples = batch // strategy.data
    if wanted is None:
        most = _MICRO_BATCHES_PER_STAGE * strategy.pipeline if strategy.pipeline > 1 else 1
        wanted = max(number for number in range(1, min(most, samples) + 1) if samples % number == 0)
    if samples % wanted:
        raise UsageError(
            f"strategy '{strategy}': {samples} samples of a replica cannot be cut into {wanted} equal micro-batches; "
            "choose --micro-batches that divide them."
        )
    return replace(strategy, num_micro_batches=wanted)


def check_model(strategy: PlannedStrategy, model: Model) -> None:
    """Raise UsageError when the model cannot be cut so: stages without layers, heads that ranks do not divide.

    What `paceline.parallelize` refuses of a module is refused here.
    """
    if (strategy.pipeline > 1 or strategy.recompute) and model.rules.no_row:
        raise UsageError(f"strategy '{strategy}': {model.rules.no_row}")
    if strategy.pipeline > model.max_stages:
        can = f", of which {model.max_stages} can be stages: each with parameters that it shares with none before it"
        can = "" if model.rules.starts is None else can
        raise UsageError(
            f"strategy '{strategy}': {strategy.pipeline} stages, and {model.name} has {len(model.layers)} layers{can}; "
            "take as many stages as layers or fewer."
        )
    if strategy.tensor == 1:
        return
    if why := model.rules.no_split(strategy.tensor):
        raise UsageError(f"strategy '{strategy}': {why}")
    if not any(layer.is_split for layer in model.layers):
        raise UsageError(
            f"strategy '{strategy}': no layer of {model.name} is known that tensor parallelism could split; it needs "
            "blocks of two linear layers or more, or a shape (--hidden, --heads)."
        )
    if model.num_heads is not None and model.num_heads % strategy.tensor:
        raise UsageError(
            f"strategy '{strategy}': {strategy.tensor} ranks do not divide the {model.num_heads} heads of {model.name}."
        )
