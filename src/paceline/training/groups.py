"""Parameter groups with a strategy each, as dense layers under all-reduce and embeddings under ssp, or a dtype each."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import Any, Final

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from paceline.errors import UsageError
from paceline.training.all_reduce import ReplicatedOptimizer
from paceline.training.downpour import Downpour
from paceline.training.flat import segments_of
from paceline.training.fsdp import FullySharded
from paceline.training.model_checks import require_own_memory
from paceline.training.state import checked_by_all, hyperparameters, numbered_for, optimizer_over
from paceline.training.strategy import Distributed, HeldTensor, Settings, Strategy, TrainingJob, require_fresh
from paceline.update.dtypes import dtype_name
from paceline.update.table import Segment

_WHOLE: Final = frozenset({"state", "param_groups"})  # keys that the state_dict of every optimizer has
_MAX_SHOWN: Final = 160  # characters of one value in messages
_SHOWN: Final = 5  # names in a message


class Groups(msgspec.Struct, frozen=True):
    """Strategy that distributes each parameter by the first pattern that matches its name.

    Args:
        strategies: patterns as for file names ("*", "?", "[ab]"), each with its strategy.
    """

    strategies: tuple[tuple[str, Strategy], ...]

    def __post_init__(self) -> None:
        """Refuse an empty mapping."""
        if not self.strategies:
            raise UsageError('strategy={} maps no pattern to a strategy: give {"*": "bsp"}, for example.')
        for pattern, strategy in self.strategies:
            if isinstance(strategy, Downpour) and strategy.warm_start_steps:
                raise UsageError(
                    f"strategy: '{pattern}' has a warm start, in which worker 0 would wait for the others in the rest "
                    "of the model: leave out warm_start_steps, or take downpour for all parameters."
                )
            if isinstance(strategy, FullySharded):
                raise UsageError(
                    f"strategy: '{pattern}' was given fsdp, which shards a model as a whole: take fsdp for all "
                    "parameters, or all-reduce in its place."
                )

    def distribute(
        self, optimizer: torch.optim.Optimizer, model: nn.Module | None, settings: Settings, job: TrainingJob
    ) -> GroupedOptimizer:
        """Make one optimizer of several, one for the parameters of each strategy."""
        if settings.part is not None:
            raise UsageError(
                f"strategy of '{settings.name}': patterns are for a model that each worker holds as a whole, and this "
                "one is cut over several: give one strategy for all of it."
            )
        require_fresh(optimizer)
        named, segments = segments_of(optimizer, model)
        require_own_memory(named, settings.name)
        dtypes = [tensor.dtype for tensor in named.values()]
        shares = [own for share in self._shares(list(named), settings.name) for own in share.by_dtype(dtypes)]
        parts: list[GroupPart] = []
        for number, share in enumerate(shares, start=1):
            own, groups = _taken(optimizer, named, segments, share.indices)
            # The last pattern, mostly "*", has most parameters; buffers are averaged once, together with these.
            average = settings.average_buffers and number == len(shares)
            how = replace(settings, name=f"{settings.name}.{share.patterns}", average_buffers=average)
            made = share.strategy.distribute(own, model, how, job)
            job.tables.require_taken(how.name)
            parts.append(GroupPart(share.patterns, made, share.indices, groups))
        return GroupedOptimizer(optimizer, parts, settings, job)

    def _shares(self, names: Sequence[str], owner: str) -> list[GroupShare]:
        """Assign the parameters to strategies; patterns with equal strategies share one.

        Raises:
            UsageError: a parameter matches no pattern, or a pattern matches no parameter.
        """
        free = dict(enumerate(names))
        shares: list[GroupShare] = []
        idle: list[str] = []
        for pattern, strategy in self.strategies:
            taken = [index for index, name in free.items() if fnmatchcase(name, pattern)]
            if not taken:
                idle.append(pattern)
            for index in taken:
                del free[index]
            same = next((share for share in shares if share.strategy == strategy), None)
            if same is not None:
                shares.remove(same)
                pattern, taken = f"{same.patterns},{pattern}", sorted([*same.indices, *taken])
            shares.append(GroupShare(pattern, strategy, tuple(taken)))
        if idle:
            raise UsageError(
                f"strategy of '{owner}': {_quoted(idle)} matches no parameter that an earlier pattern has not taken; "
                f"parameters are {_quoted(names)}."
            )
        if free:
            raise UsageError(
                f"strategy of '{owner}': no pattern matches {_quoted(list(free.values()))}: add one, or "
                '"*" with a strategy for the rest as the last.'
            )
        return shares


class GroupShare(msgspec.Struct, frozen=True):
    """The parameters of one strategy, by their indices in the optimizer, in order."""

    patterns: str
    strategy: Strategy
    indices: tuple[int, ...]

    def by_dtype(self, dtypes: Sequence[torch.dtype]) -> list[GroupShare]:
        """Return a share for each dtype of its parameters, as a table has one; those of all parameters are given."""
        found: dict[torch.dtype, list[int]] = {}
        for index in self.indices:
            found.setdefault(dtypes[index], []).append(index)
        if len(found) == 1:
            return [self]
        return [
            replace(self, patterns=f"{self.patterns}.{dtype_name(dtype)}", indices=tuple(indices))
            for dtype, indices in found.items()
        ]


class GroupPart(msgspec.Struct, frozen=True):
    """The optimizer of one strategy's parameters.

    Args:
        patterns: those of the strategy.
        optimizer: of these parameters only.
        indices: of its parameters in the whole optimizer, in order.
        groups: for each of its groups, the index of the group in the whole optimizer with the same hyperparameters.
    """

    patterns: str
    optimizer: Distributed
    indices: tuple[int, ...]
    groups: tuple[int, ...]

    def own(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return this group's slice of a whole optimizer's state dict, in its own form."""
        state, groups = state_dict["state"], state_dict["param_groups"]
        first, own_groups = 0, list[dict[str, Any]]()
        for number, group in zip(self.groups, self.optimizer.param_groups, strict=True):
            stop = first + len(group["params"])
            own_groups.append({**hyperparameters(groups[number]), "params": list(range(first, stop))})
            first = stop
        beside = state_dict.get("parts", {}).get(self.patterns, {})
        own = {index: state[whole] for index, whole in enumerate(self.indices) if whole in state}
        return {"state": own, "param_groups": own_groups, **beside}


class GroupedOptimizer(Distributed):
    """Optimizer used like the one it was made from, with a strategy of its own for each set of parameters.

    A step is one clock: all parts send, the clock is finished, all parts receive. `param_groups` are those of the
    wrapped optimizer; changes by schedulers reach the parts with `zero_grad` and with `step`.

    Attributes:
        num_refused: steps and pushes that were not applied, over all parts.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, parts: Sequence[GroupPart], settings: Settings, job: TrainingJob
    ) -> None:
        super().__init__(optimizer, "by groups", settings, job)
        self._has_told_of_clipping = False
        # Parts whose workers wait for each other in backward come first: a worker without a batch has to take part
        # there before it waits for values of other parts, because the clock of the others ends after their backward.
        self._parts = tuple(sorted(parts, key=lambda part: part.optimizer.turn_s == 0.0))
        self.no_slices = next((part.optimizer.no_slices for part in self._parts if part.optimizer.no_slices), "")
        self.no_scaling = next((part.optimizer.no_scaling for part in self._parts if part.optimizer.no_scaling), "")
        if any(isinstance(part.optimizer, ReplicatedOptimizer) for part in self._parts):
            self.no_scaling = (
                "groups of which one is under all-reduce, whose gradients need the same scale on all workers: train in "
                "bfloat16."
            )
        self._note_turn()

    def __repr__(self) -> str:
        """Return what is distributed, and how."""
        text = "; ".join(f"{part.patterns}: {part.optimizer.title}" for part in self._parts)
        return f"Distributed by groups ({text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + '...'})"

    @property
    def num_refused(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return how many steps or pushes of this worker were not applied, over all parts."""
        return sum(part.optimizer.num_refused for part in self._parts)

    def held_tensors(self) -> list[HeldTensor]:
        """Return those of all parts."""
        return [held for part in self._parts for held in part.optimizer.held_tensors()]

    # -- the loop ----------------------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the parameters and those collected by embeddings."""
        super().zero_grad(set_to_none)
        for part in self._parts:
            part.optimizer.zero_grad(set_to_none)
        self._copy_hyperparameters()

    def weigh(self, samples: float) -> None:
        """Set before backward how many samples the gradients of this step stand for.

        Used by parts under all-reduce, which weight them while backward runs; needed only where that is not what
        loaders from `shard` have returned.
        """
        for part in self._parts:
            if isinstance(part.optimizer, ReplicatedOptimizer):
                part.optimizer.weigh(samples)

    def clip_gradients(self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False) -> Tensor:
        """Clip the gradients by one norm over all parts, or those of each part by their own.

        One norm is for gradients that backward has combined in all parts, or that in all parts go as pushes of their
        own. Else no process has the gradients of all parts as they are used, so each part is clipped as its strategy
        alone does it, which is told once: one norm would differ from worker to worker, and part their replicas.
        """
        optimizers = [part.optimizer for part in self._parts]
        replicated = [isinstance(one, ReplicatedOptimizer) for one in optimizers]
        if self._job.size == 1 or all(replicated) or not any(one.clips_mean for one in optimizers):
            return super().clip_gradients(max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)
        if not self._has_told_of_clipping:
            self._has_told_of_clipping = True
            self._job.metrics.tell(
                f"worker {self._job.rank}, '{self._settings.name}': each group of parameters is clipped by its own "
                "norm, not all by one as after torch's DDP: no process has the gradients of all groups as they are "
                "used."
            )
        norms = [one.clip_gradients(max_norm, norm_type, error_if_nonfinite=error_if_nonfinite) for one in optimizers]
        return get_total_norm(norms, norm_type)

    def send(self, samples: float | None) -> float:
        """Send the gradients of all parts, with the same weight.

        Raises:
            UsageError: gradients that a part cannot use; see `send` of its strategy.
        """
        self._copy_hyperparameters()
        weight = samples
        for part in self._parts:
            part.optimizer.expected = self.expected
            part.optimizer.overflowed = self.overflowed
            weight = part.optimizer.send(weight)
            part.optimizer.overflowed = False
        assert weight is not None, "there are parts"
        self._note_turn()
        return weight

    def receive(self) -> None:
        """Request the values of all parts."""
        for part in self._parts:
            part.optimizer.receive()

    def step_without_batch(self) -> None:
        """Take part in a step without a batch, in every part."""
        self._copy_hyperparameters()
        for part in self._parts:
            part.optimizer.step_without_batch()
        self._note_turn()

    def wait_for_values(self) -> None:
        """Wait until all parameters have the values requested by the last step."""
        for part in self._parts:
            part.optimizer.wait_for_values()

    @contextmanager
    def accumulate(self) -> Generator[None]:
        """Keep the gradients of the passes in the block local, because more are added before the step."""
        with ExitStack() as held:
            for part in self._parts:
                held.enter_context(part.optimizer.accumulate())
            yield

    @contextmanager
    def snapshot(self) -> Generator[None]:
        """Put one consistent state of each part into the model for the length of a `with` block, without gradients."""
        with ExitStack() as held:
            for part in self._parts:
                held.enter_context(part.optimizer.snapshot())
            yield

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all parts in the form of the wrapped optimizer's own `state_dict`; blocks.

        State of a part beyond that of its optimizer is under "parts", by its patterns.
        """
        state: dict[int, Any] = {}
        beside: dict[str, dict[str, Any]] = {}
        for part in self._parts:
            found = part.optimizer.state_dict()
            state.update({part.indices[index]: values for index, values in found["state"].items()})
            beside[part.patterns] = {key: value for key, value in found.items() if key not in _WHOLE}
        beside = {patterns: more for patterns, more in beside.items() if more}
        whole = {**super().state_dict(), "state": dict(sorted(state.items()))}
        return {**whole, "parts": beside} if beside else whole

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of all parts, with the parameters and buffers of worker 0.

        Every worker must call it, with the same state; blocks until all have.

        Raises:
            UsageError: the state belongs to another optimizer or model. Where a part refuses its own, those before it
                have loaded theirs; other groups are refused before any part loads.
        """
        with checked_by_all(self._job):
            numbered = numbered_for(self, state_dict, self._settings.name)
        for part in self._parts:
            part.optimizer.load_state_dict(part.own(numbered))
        for own, given in zip(self.param_groups, numbered["param_groups"], strict=True):
            own.update(hyperparameters(given))

    # -- behind the scenes -------------------------------------------------------------------------------------------

    def freeze_values(self) -> None:
        """Freeze the parameters of every part."""
        for part in self._parts:
            part.optimizer.freeze_values()

    def detach(self) -> None:
        """Detach every part."""
        for part in self._parts:
            part.optimizer.detach()

    def _copy_hyperparameters(self) -> None:
        """Copy the current hyperparameters of the groups to the parts."""
        for part in self._parts:
            for number, own in zip(part.groups, part.optimizer.param_groups, strict=True):
                own.update(hyperparameters(self.param_groups[number]))

    def _note_turn(self) -> None:
        self.turn_s = max(part.optimizer.turn_s for part in self._parts)


def _taken(
    optimizer: torch.optim.Optimizer, named: Mapping[str, Tensor], segments: Sequence[Segment], indices: Sequence[int]
) -> tuple[torch.optim.Optimizer, tuple[int, ...]]:
    """Return an optimizer of the same kind over some of the parameters, and the indices of their groups."""
    names, tensors = list(named), list(named.values())
    pairs: dict[int, list[tuple[str, Tensor]]] = {}
    for index in indices:
        pairs.setdefault(segments[index].group, []).append((names[index], tensors[index]))
    groups = [{**hyperparameters(optimizer.param_groups[number]), "params": own} for number, own in pairs.items()]
    return optimizer_over(optimizer, groups), tuple(pairs)


def _quoted(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(f"'{name}'" for name in names[:_SHOWN]) + more
