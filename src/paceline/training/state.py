"""Optimizer state, gathered from the servers and loaded back, in the form of torch's own state dicts.

Training continues under a plain `torch.optim` optimizer, or from one, bit for bit.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, cast

import torch
from safetensors.torch import load, save
from torch import Tensor

from paceline.core.calls import shown
from paceline.core.partition import Range
from paceline.errors import PacelineError, ProtocolBug, UsageError
from paceline.training.flat import FlatParameters, laid_out_like
from paceline.training.state_checks import class_of, require_form, require_hyper, require_numbers, require_states
from paceline.update.dtypes import torch_dtype
from paceline.update.named_rules import granularity
from paceline.update.placement import spans
from paceline.update.rules import Hyper
from paceline.update.shard import VALUES
from paceline.update.table import SegmentPiece, TableSpec, cut, positional_name
from paceline.wire.malformed import read_answer_of
from paceline.wire.requests import LoadState, SaveState
from paceline.worker.table import Table

if TYPE_CHECKING:
    from paceline.training.strategy import Distributed, TrainingJob

StateOf = dict[int, dict[str, Tensor]]
Part: TypeAlias = tuple[Range, Mapping[str, Tensor]]


def fetch_state(table: Table, flat: FlatParameters) -> StateOf:
    """Return the state of a table's update rule as the "state" of a plain torch optimizer of these tensors; blocks."""
    layout = spans(table.spec, table.node.settings)
    what = f"the servers' state of table '{table.name}'"
    bodies = table.node.rpc.call_all(lambda number: SaveState(number, table.name), what)
    parts = [
        (span, read_answer_of(span.server, what, lambda body: load(bytes(body)), body))
        for span, body in zip(layout, bodies, strict=True)
    ]
    return _laid_out(flat.tensors, gather_optimizer(table.spec, parts)["state"])


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


def optimizer_over(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return an optimizer of the same kind over other parameters, with groups that have all hyperparameters."""
    # Some classes (AdamW) have defaults that their constructor refuses: those are in the groups anyway.
    accepted = inspect.signature(type(optimizer)).parameters
    defaults = {key: value for key, value in optimizer.defaults.items() if key in accepted}
    return type(optimizer)(groups, **defaults)


def check_state(
    spec: TableSpec, state_dict: dict[str, Any], groups: Sequence[Mapping[str, Any]] | None = None
) -> OptimizerState:
    """Return a `state_dict` with the numbers of this table's parameters, once it is known to be of its optimizer.

    Args:
        spec: of the table.
        state_dict: of the whole optimizer.
        groups: of the optimizer, whose hyperparameters those of the state replace; None where they do not count.

    Raises:
        UsageError: it has other groups, a state of something else, or one that does not fit its parameter; or servers
            would refuse pushes with its hyperparameters.
    """
    sizes = Counter(segment.group for segment in spec.segments)
    expected = [sizes[group] for group in range(len(spec.rule.groups))]
    numbered = cast("OptimizerState", _with_numbers(state_dict, expected, f"table '{spec.name}'"))
    if groups is not None:
        require_hyper(spec, [{**own, **given} for own, given in zip(groups, numbered["param_groups"], strict=True)])
    kind = class_of(spec)
    if kind is not None:
        require_states(kind, _stand_ins(spec), numbered["state"])
    state = split_optimizer(spec, numbered, Range(0, 0, spec.numel))
    for key, value in state.items() if granularity(spec.rule) == "element" else ():
        segment = spec.segments[int(key.partition(".")[0])]
        if tuple(value.shape) not in ((), segment.shape):
            raise UsageError(
                f"the state '{key.partition('.')[2]}' of parameter '{segment.name}' has shape {tuple(value.shape)}, "
                f"expected {segment.shape}: it is of another model."
            )
    return numbered


def _stand_ins(spec: TableSpec) -> list[tuple[str, Tensor]]:
    """Return tensors without values in place of the parameters of a table, in the order in which torch numbers them."""
    dtype = torch_dtype(spec.dtype)
    ordered = sorted(spec.segments, key=lambda segment: segment.group)
    return [(segment.name, torch.empty(segment.shape, dtype=dtype, device="meta")) for segment in ordered]


def numbered_for(
    optimizer: Distributed, state_dict: dict[str, Any], name: str, named: Mapping[str, Tensor] | None = None
) -> dict[str, Any]:
    """Return a `state_dict` with the numbers of an optimizer's parameters, once it is known to be of such an optimizer.

    Args:
        optimizer: that is to load it.
        state_dict: what is to be loaded.
        name: of the optimizer.
        named: its parameters by name, for messages; by default as the optimizer was given them.

    Raises:
        UsageError: it has other groups, a state of something else, or one that does not fit its parameter.
    """
    groups = optimizer.param_groups
    numbered = _with_numbers(state_dict, [len(group["params"]) for group in groups], f"'{name}'")
    require_numbers(optimizer.kind, optimizer.defaults, numbered["param_groups"])
    require_states(optimizer.kind, _by_name(groups, named or {}), numbered["state"])
    return numbered


def _by_name(groups: Sequence[dict[str, Any]], named: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """Return the parameters of an optimizer in order, with a name each."""
    names = {id(parameter): name for name, parameter in named.items()}
    return [
        (names.get(id(parameter), positional_name(number, index)), parameter)
        for number, group in enumerate(groups)
        for index, parameter in enumerate(group["params"])
    ]


def laid_out_for(
    optimizer: Distributed, state_dict: dict[str, Any], name: str, named: Mapping[str, Tensor] | None = None
) -> dict[str, Any]:
    """Return what `numbered_for` does, with states in the memory layout of their parameters: files keep none."""
    numbered = numbered_for(optimizer, state_dict, name, named)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {**numbered, "state": _laid_out(parameters, numbered["state"])}


def _laid_out(parameters: Sequence[Tensor], state: Mapping[int, Mapping[str, Any]]) -> StateOf:
    return {
        index: {
            key: laid_out_like(parameters[index].detach(), value) if isinstance(value, Tensor) else value
            for key, value in values.items()
        }
        for index, values in state.items()
    }


def _with_numbers(state_dict: dict[str, Any], sizes: list[int], owner: str) -> dict[str, Any]:
    """Return a `state_dict` whose parameters have the numbers that torch counts, group by group.

    They may be named by what its groups list, numbers or names, or by the texts of these, as
    `torch.distributed.checkpoint` and JSON write them; they are taken in the order of the groups, as torch does.
    """
    require_form(state_dict)
    found = [len(group["params"]) for group in cast("list[dict[str, Any]]", state_dict["param_groups"])]
    if found != sizes:
        raise UsageError(
            f"the state has parameter groups of {found} parameters, the optimizer of {owner} has {sizes}: "
            "it is of another model or optimizer."
        )
    listed = [parameter for group in state_dict["param_groups"] for parameter in group["params"]]
    number_of = {text: number for number, parameter in enumerate(listed) for text in (parameter, str(parameter))}
    unknown = [key for key in state_dict["state"] if key not in number_of]
    if unknown:
        raise UsageError(
            f"the state_dict of an optimizer has a state of {shown(unknown[0])}, which is in none of its groups: give "
            "it as state_dict() returned it."
        )
    state = {number_of[key]: values for key, values in state_dict["state"].items()}
    groups = [
        {**group, "params": [number_of[parameter] for parameter in group["params"]]}
        for group in state_dict["param_groups"]
    ]
    return {**state_dict, "state": state, "param_groups": groups}


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


class OptimizerState(TypedDict):
    """What `torch.optim.Optimizer.state_dict()` returns, and `load_state_dict` takes."""

    state: dict[int, dict[str, Tensor]]
    param_groups: list[dict[str, object]]


def gather_optimizer(spec: TableSpec, parts: Sequence[Part], hyper: Sequence[Hyper] = ()) -> OptimizerState:
    """Return the `state_dict` of the plain torch optimizer from the `Shard.state` of every range.

    Args:
        spec: a table whose rule is a class of torch.optim.
        parts: each range with the state of its shard.
        hyper: the hyperparameters of each group by now (`Shard.hyper`); those of the table when left out.

    Raises:
        UsageError: the ranges do not cover the table.
        ProtocolBug: the shards disagree about a state that a tensor has only once, its step count for example.
    """
    ordered = _in_order(spec, parts)
    holders = Counter(piece.segment for span, _ in ordered for piece in cut(spec, span))
    ids = _ids(spec)
    gathered: dict[int, dict[str, Tensor]] = {}
    for (segment, name), found in sorted(_by_segment(ordered).items()):
        joined = _joined(found, holders[segment], spec, segment, name)
        gathered.setdefault(ids[segment], {})[name] = joined
    groups: list[dict[str, object]] = [
        {**numbers, "params": [ids[i] for i, segment in enumerate(spec.segments) if segment.group == group]}
        for group, numbers in enumerate(hyper or spec.rule.groups)
    ]
    return {"state": gathered, "param_groups": groups}


def split_optimizer(spec: TableSpec, state_dict: OptimizerState, span: Range) -> dict[str, Tensor]:
    """Return what one range needs of a plain torch optimizer's state: join with "values" for `Shard.load_state`.

    Raises:
        UsageError: a state is not a tensor, or fits neither its parameter nor a cut through it.
    """
    ids = _ids(spec)
    return {
        f"{piece.segment}.{name}": _cut_state(spec, piece, name, value)
        for piece in cut(spec, span)
        for name, value in cast("dict[str, object]", state_dict["state"].get(ids[piece.segment], {})).items()
        if value is not None
    }


def _ids(spec: TableSpec) -> list[int]:
    """Return the id that torch gives each segment: it counts group by group, in order within each."""
    order = sorted(range(len(spec.segments)), key=lambda index: spec.segments[index].group)
    ids = [0] * len(order)
    for number, segment in enumerate(order):
        ids[segment] = number
    return ids


def _in_order(spec: TableSpec, parts: Sequence[Part]) -> list[Part]:
    """Return the parts that hold something, by their place in the table; they must cover it exactly."""
    ordered = sorted((part for part in parts if part[0].length), key=lambda part: part[0].start)
    reached = 0
    for span, _ in ordered:
        if span.start != reached:
            break
        reached = span.stop
    if reached != spec.numel:
        have = ", ".join(f"{span.start} to {span.stop}" for span, _ in ordered) or "nothing"
        raise UsageError(
            f"Table '{spec.name}': the shards hold elements {have}, expected 0 to {spec.numel} without gap or overlap. "
            "Give the state of every server."
        )
    return ordered


def _by_segment(parts: Sequence[Part]) -> dict[tuple[int, str], list[Tensor]]:
    """Return the tensors of every state of every segment, in the order of the parts."""
    found: dict[tuple[int, str], list[Tensor]] = {}
    for _, state in parts:
        for key, value in state.items():
            if key != VALUES:
                segment, _, name = key.partition(".")
                found.setdefault((int(segment), name), []).append(value)
    return found


def _joined(found: Sequence[Tensor], num_holders: int, spec: TableSpec, segment: int, name: str) -> Tensor:
    """Return one state of a whole segment, as a copy."""
    if num_holders == len(found) == 1:
        return found[0].clone()
    if len(found) == num_holders and found[0].dim():
        return torch.cat(list(found)).view(spec.segments[segment].shape)
    if len(found) == num_holders and all(torch.equal(other, found[0]) for other in found):
        return found[0].clone()
    raise ProtocolBug(
        f"Table '{spec.name}', parameter '{spec.segments[segment].name}': its {num_holders} shards disagree about "
        f"'{name}', {len(found)} of them have it: {', '.join(map(str, found))}. Gather them at the same version."
    )


def _cut_state(spec: TableSpec, piece: SegmentPiece, name: str, value: object) -> Tensor:
    segment = spec.segments[piece.segment]
    where = f"Table '{spec.name}': optimizer state '{name}' of parameter '{segment.name}'"
    if not isinstance(value, Tensor):
        raise UsageError(f"{where} is a {type(value).__name__}, expected a tensor. Save it with a newer torch.")
    is_like_values = value.is_floating_point() and (value.dim() > 0 or not segment.shape)
    if is_like_values and name != "step":  # as torch does when it loads
        value = value.to(torch_dtype(spec.dtype))
    if piece.whole or not value.dim():
        return value.detach().cpu().contiguous()  # in the order of the shape, whatever that in memory was
    if tuple(value.shape) != segment.shape:
        raise UsageError(f"{where} has shape {tuple(value.shape)}, expected {segment.shape}, which can be cut.")
    return piece.cut(value.detach()).cpu()
