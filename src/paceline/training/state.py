"""Optimizer state, gathered from the servers and loaded back, in the form of torch's own state dicts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, cast

from safetensors.torch import load, save
from torch import Tensor

from paceline.core.partition import Range
from paceline.errors import PacelineError, UsageError
from paceline.training.flat import FlatParameters
from paceline.update.named_rules import granularity
from paceline.update.placement import spans
from paceline.update.state_dict import OptimizerState, gather_optimizer, split_optimizer
from paceline.update.table import TableSpec
from paceline.wire.malformed import read_answer_of
from paceline.wire.requests import LoadState, SaveState
from paceline.worker.table import Table

if TYPE_CHECKING:
    from paceline.training.strategy import TrainingJob

StateOf = dict[int, dict[str, Tensor]]


def fetch_state(table: Table) -> StateOf:
    """Return the state of a table's update rule as the "state" of the plain torch optimizer; blocks."""
    layout = spans(table.spec, table.node.settings)
    what = f"the servers' state of table '{table.name}'"
    bodies = table.node.rpc.call_all(lambda number: SaveState(number, table.name), what)
    parts = [
        (span, read_answer_of(span.server, what, lambda body: load(bytes(body)), body))
        for span, body in zip(layout, bodies, strict=True)
    ]
    return gather_optimizer(table.spec, parts)["state"]


def send_state(table: Table, state: StateOf, flat: FlatParameters) -> None:
    """Set the values of a table to `flat`, and the state of its rule, on all servers; blocks."""
    values = flat.empty()
    flat.pack_values(values)
    bodies: list[memoryview] = []
    for span in spans(table.spec, table.node.settings):
        part = split_optimizer(table.spec, {"state": state, "param_groups": []}, span)
        bodies.append(memoryview(save({**part, "values": values[span.start : span.stop].clone()})))
    table.node.rpc.call_all(
        lambda number: LoadState(number, table.name), f"servers to load table '{table.name}'", bodies
    )


def hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a parameter group of an optimizer holds besides its parameters and their names."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def check_state(spec: TableSpec, state_dict: dict[str, Any]) -> None:
    """Refuse a `state_dict` that is not of this table's optimizer over this table's parameters.

    Raises:
        UsageError: it has other groups, or a state that does not fit its parameter.
    """
    if not {"state", "param_groups"} <= state_dict.keys():
        raise UsageError(f"a state_dict of an optimizer has 'state' and 'param_groups', this has {sorted(state_dict)}.")
    sizes = Counter(segment.group for segment in spec.segments)
    expected = [sizes[group] for group in range(len(spec.rule.groups))]
    found = [len(group["params"]) for group in cast("list[dict[str, Any]]", state_dict["param_groups"])]
    if found != expected:
        raise UsageError(
            f"the state has parameter groups of {found} parameters, the optimizer of table '{spec.name}' has "
            f"{expected}: it is of another model or optimizer."
        )
    state = split_optimizer(spec, cast("OptimizerState", state_dict), Range(0, 0, spec.numel))
    for key, value in state.items() if granularity(spec.rule) == "element" else ():
        segment = spec.segments[int(key.partition(".")[0])]
        if tuple(value.shape) not in ((), segment.shape):
            raise UsageError(
                f"the state '{key.partition('.')[2]}' of parameter '{segment.name}' has shape {tuple(value.shape)}, "
                f"expected {segment.shape}: it is of another model."
            )


@contextmanager
def checked_by_all(job: TrainingJob) -> Generator[None]:
    """Continue after the `with` block only if it has succeeded on all workers; blocks until all reach its end.

    Raises:
        Refused: it has failed on another worker.
    """
    with _together(job, "check of a state"):
        yield


@contextmanager
def loaded_by_first(job: TrainingJob, first: int) -> Generator[None]:
    """Load on worker `first` in the `with` block, and continue on all only if that has succeeded.

    Raises:
        Refused: it has failed on that worker, or that is gone.
    """
    with _together(job, "load of a state", first):
        yield


@contextmanager
def _together(job: TrainingJob, place: str, first: int | None = None) -> Generator[None]:
    try:
        yield
    except Exception as error:
        with suppress(PacelineError):  # the error that the others see; this worker has the original
            job.barrier_at(place, f"{type(error).__name__}: {error}")
        raise
    job.barrier_at(place, needs_first=first is not None, first=first or 0)
