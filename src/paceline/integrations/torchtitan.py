"""TorchTitan: `from paceline.integrations.torchtitan import OptimizersContainer` in place of torchtitan's own."""

# The types of torchtitan are looked at where it is installed, which the environment of development has not.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from paceline.api.script import barrier
from paceline.errors import UsageError
from paceline.integrations.ranks import clip_by_norm, distribute, join_with_ranks, require
from paceline.training.state import hyperparameters

require("torchtitan", "torchtitan")

from torchtitan.components import optimizer as titan  # noqa: E402 - after the message for a missing one
from torchtitan.components.optimizer.utils import init_optim_state  # noqa: E402

Flat: TypeAlias = dict[str, Any]  # of all optimizers, "state.0.weight.exp_avg" and "param_groups.0.weight.lr"
_Blank: TypeAlias = Mapping[str, Mapping[str, Tensor]]  # shapes and dtypes of states, by parameter and by state


class OptimizersContainer(titan.OptimizersContainer):
    """The `OptimizersContainer` of torchtitan, whose optimizers step by Paceline.

    Making it joins the job; blocks until all workers have. Leave models as they are, without `replicate`, DDP or FSDP
    around them: the optimizers combine the gradients of all workers. Its state is that of torchtitan's own, which
    `torch.distributed.checkpoint` saves and loads.

    Raises:
        UsageError: an optimizer cannot run on a server, or its states are to be of bfloat16.

    Example:
        >>> import torch
        >>> from torchtitan.components.optimizer import ParamGroupConfig
        >>> from paceline.integrations.torchtitan import OptimizersContainer
        >>> group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.01})
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizers = OptimizersContainer.Config(param_groups=[group]).build(model_parts=[model])
        >>> model(torch.ones(2)).sum().backward()
        >>> optimizers.step()
    """

    @dataclass(kw_only=True, slots=True)
    class Config(titan.OptimizersContainer.Config):
        """The configuration of torchtitan's own, and the options of `paceline.distributed` for all optimizers."""

        options: dict[str, Any] = field(default_factory=dict[str, Any])

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        if config.implementation == "fused_opt_states_bf16":
            raise UsageError(
                "torchtitan: the implementation 'fused_opt_states_bf16' makes states of bfloat16, and servers keep "
                "them in the dtype of the parameters: take 'fused'."
            )
        join_with_ranks()
        super().__init__(config, model_parts=model_parts)
        self._blanks = [_blank(each) for each in self.optimizers]
        self.optimizers = [distribute(each, _part_of(each, model_parts), **config.options) for each in self.optimizers]

    def clip_gradients(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients of the step by their norm; return that of this worker's own gradients.

        The mean of all workers is clipped where there is one optimizer, as `clip_grad_norm_` does under DDP; with
        several, each worker clips its own gradients.
        """
        parameters = [each for part in self.model_parts for each in part.parameters()]
        return clip_by_norm(self.optimizers, parameters, max_norm, norm_type)

    def state_dict(self) -> Flat:
        """Return the state of all optimizers, by the names of parameters; blocks until all workers have called it.

        Before the first step it holds zeros, into which `torch.distributed.checkpoint` loads.
        """
        barrier()  # so that it is of one clock
        flat: Flat = {}
        for optimizer, blank in zip(self.optimizers, self._blanks, strict=True):
            told = optimizer.state_dict()
            for number, name, group in _named(told):
                state = told["state"].get(number) or {key: _zeros(one) for key, one in blank[name].items()}
                flat.update({f"state.{name}.{key}": value for key, value in state.items()})
                flat.update({f"param_groups.{name}.{key}": value for key, value in hyperparameters(group).items()})
        return flat

    def load_state_dict(self, state_dict: Flat) -> None:
        """Load a state into the servers, with the parameters of worker 0; blocks until all workers have called it.

        Raises:
            UsageError: it is of another model or other optimizers.
        """
        for optimizer, blank in zip(self.optimizers, self._blanks, strict=True):
            told = optimizer.state_dict()
            told["state"] = {
                number: {key: _found(state_dict, f"state.{name}.{key}") for key in blank[name]}
                for number, name, _ in _named(told)
            }
            for group in told["param_groups"]:
                place = f"param_groups.{group['param_names'][0]}"
                group.update({key: _found(state_dict, f"{place}.{key}") for key in hyperparameters(group)})
            optimizer.load_state_dict(told)


def _part_of(optimizer: torch.optim.Optimizer, model_parts: Sequence[nn.Module]) -> nn.Module:
    """Return the part of the model that an optimizer was built for."""
    first = optimizer.param_groups[0]["params"][0]
    return next(part for part in model_parts if any(each is first for each in part.parameters()))


def _blank(optimizer: torch.optim.Optimizer) -> _Blank:
    """Return what the state of an optimizer will look like, without its values; it keeps none."""
    init_optim_state(optimizer)
    told = optimizer.state_dict()
    blank = {
        name: {key: torch.empty_like(value, device="meta") for key, value in told["state"][number].items()}
        for number, name, _ in _named(told)
    }
    optimizer.state.clear()
    return blank


def _zeros(blank: Tensor) -> Tensor:
    return torch.zeros(blank.shape, dtype=blank.dtype)


def _named(told: Mapping[str, Any]) -> Iterator[tuple[int, str, Mapping[str, Any]]]:
    """Yield of each parameter in a state its number, its name, and the group that it is in."""
    for group in told["param_groups"]:
        for number, name in zip(group["params"], group["param_names"], strict=True):
            yield number, name, group


def _found(state_dict: Flat, key: str) -> Any:  # noqa: ANN401 - a tensor, or a number of a group
    if key not in state_dict:
        raise UsageError(
            f"torchtitan: the state has no '{key}', which this model and its optimizers have: it is of another model, "
            "or was saved without the schedulers that there are now."
        )
    return state_dict[key]
