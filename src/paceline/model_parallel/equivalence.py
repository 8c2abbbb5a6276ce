"""Check that split layers compute what whole ones would: a trial of the module around them at its first call.

Names and shapes do not show what a forward does between two layers: a softmax over all features would see those of one
rank only. So the module runs on its first inputs once with whole layers, and once for each rank with parts. Layers
return the same random stand-in features in all runs, cut for a rank, so nothing is sent; dropout is disabled.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.hooks import RemovableHandle

from paceline.errors import UsageError
from paceline.model_parallel.split_layers import ColumnLinear, LayerCut, RowLinear, SplitLayer

_DROPOUTS: Final[tuple[Callable[..., Tensor], ...]] = (
    *(functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d),
    *(functional.alpha_dropout, functional.feature_alpha_dropout, torch.dropout, torch.alpha_dropout),
)


class _Different(Exception):
    """A value differs from that with whole layers."""


@dataclass(slots=True)
class EquivalenceTrial:
    """One run of a module with stand-ins for its split layers.

    Args:
        size: number of ranks.
        rank: rank whose part is computed; None for whole layers.
        seen: inputs of the layers in the run with whole layers.
    """

    size: int
    rank: int | None
    seen: list[Tensor] = field(default_factory=list[Tensor])
    called: set[SplitLayer] = field(default_factory=set[SplitLayer])
    _num_seen: int = 0

    def check_inputs(self, layer: SplitLayer, inputs: Tensor, cut: LayerCut | None = None) -> None:
        """Record the inputs of a whole layer, or compare those of a split one with them.

        Args:
            layer: the layer that is called.
            inputs: (...,) of the layer.
            cut: how inputs are divided among ranks; None where each rank has all of them.
        """
        self.called.add(layer)
        if self.rank is None:
            self.seen.append(inputs.detach().clone())
            return
        if self._num_seen == len(self.seen):
            raise _Different
        expected = self.seen[self._num_seen]
        self._num_seen += 1
        require_same(inputs, expected if cut is None else cut.part(expected, self.rank, self.size))

    def end(self) -> None:
        """Raise unless as many layers were called as in the run with whole layers."""
        if self._num_seen != len(self.seen):
            raise _Different

    def stand_in_outputs(
        self, layer: SplitLayer, shape: Sequence[int], width: int, cut: LayerCut | None = None
    ) -> Tensor:
        """Return stand-ins for the outputs of a layer, (*shape, width), cut for a rank."""
        parameter = next(layer.parameters())
        return self.stand_in((*shape, width), _dtype(parameter), parameter.device, cut)

    def stand_in(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, cut: LayerCut | None = None
    ) -> Tensor:
        """Return random numbers that grow with the feature, the same in every run; cut for a rank."""
        generator = torch.Generator().manual_seed(len(self.seen) if self.rank is None else self._num_seen)
        drawn = torch.rand(*shape, generator=generator) + torch.linspace(0.5, 3.0, shape[-1])
        drawn = drawn.to(dtype).to(device)
        return drawn if cut is None or self.rank is None else cut.part(drawn, self.rank, self.size)


class WholeCheck:
    """Checks a module at its first call, and again while some of its layers have not been called."""

    def __init__(self, unit: nn.Module, name: str, size: int, heads: Sequence[tuple[nn.Module, str]]) -> None:
        self._unit, self._name, self._size, self._heads = unit, name, size, heads
        self._running = False
        self._handle: RemovableHandle = unit.register_forward_pre_hook(self._before, with_kwargs=True)

    def _before(self, unit: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._running or any(layer.trial is not None for layer in self._layers()):  # inside of another trial
            return
        self._running = True
        try:
            self._check(args, kwargs)
        finally:
            self._running = False
        if all(layer.is_proven for layer in self._layers()):
            self._handle.remove()

    def _layers(self) -> list[SplitLayer]:
        return [one for one in self._unit.modules() if isinstance(one, SplitLayer)]

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise UsageError on every rank unless the outputs of all ranks equal those of whole layers."""
        whole = EquivalenceTrial(self._size, None)
        expected = self._run(whole, args, kwargs)
        for rank in range(self._size):
            part = EquivalenceTrial(self._size, rank, whole.seen)
            try:
                found = self._run(part, args, kwargs)
                part.end()
                require_same(found, expected)
            except UsageError:
                raise
            except Exception as error:  # whatever the script's forward raises on a part
                why = "" if isinstance(error, _Different) else f" It fails on a part: {type(error).__name__}: {error}."
                raise UsageError(self._told(why)) from error
        for layer in whole.called:
            layer.is_proven = True

    def _told(self, why: str) -> str:
        names = [name for name, one in self._unit.named_modules() if isinstance(one, SplitLayer)]
        return (
            f"'{self._name}', a {type(self._unit).__name__}, cannot be split by its layers {', '.join(names[:6])}: "
            "what stands between them needs the features of all ranks, as a softmax or a norm over them does, so "
            f"parts give something else than the whole.{why} Leave these layers out: name those to split in a "
            "tensor_plan."
        )

    def _run(self, trial: EquivalenceTrial, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Return the outputs of the module in a trial, which does not change it."""
        held = [*self._unit.parameters(), *self._unit.buffers()]
        devices = sorted({one.device.index or 0 for one in held if one.is_cuda})
        given = tree_map_only(Tensor, torch.clone, (args, kwargs))
        with torch.no_grad(), torch.random.fork_rng(devices), self._standing_in(trial), _WithoutDropout():
            return self._unit.forward(*given[0], **given[1])

    @contextmanager
    def _standing_in(self, trial: EquivalenceTrial) -> Generator[None]:
        layers = self._layers()
        buffers = {buffer: buffer.clone() for buffer in self._unit.buffers()}
        numbers = [*self._heads, *((one, "out_features") for one in layers if isinstance(one, ColumnLinear))]
        numbers += [(one, "in_features") for one in layers if isinstance(one, RowLinear)]
        own = [(owner, name, getattr(owner, name)) for owner, name in numbers]
        for layer in layers:
            layer.trial = trial
        for owner, name, number in own if trial.rank is None else ():
            setattr(owner, name, number * trial.size)
        try:
            yield
        finally:
            for owner, name, number in own:
                setattr(owner, name, number)
            for layer in layers:
                layer.trial = None
            for buffer, before in buffers.items():
                buffer.data.copy_(before)


class _WithoutDropout(TorchFunctionMode):
    """Disables dropout, which would drop other features of parts than of the whole."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # noqa: ANN401 - whatever the function gives
        named = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else named["input"]
        if func is functional.scaled_dot_product_attention and len(args) > 4:
            args = (*args[:4], 0.0, *args[5:])
        elif func is functional.scaled_dot_product_attention:
            named["dropout_p"] = 0.0
        return func(*args, **named)


def require_same(found: object, expected: object) -> None:
    """Raise unless two results have the same structure and, except for rounding, the same values."""
    leaves, spec = tree_flatten(found)
    others, other_spec = tree_flatten(expected)
    if spec != other_spec:
        raise _Different
    for one, other in zip(leaves, others, strict=True):
        if not isinstance(one, Tensor) or not isinstance(other, Tensor):
            continue
        if one.shape != other.shape or one.dtype != other.dtype:
            raise _Different
        close = torch.finfo(one.dtype).eps ** 0.5 if one.is_floating_point() or one.is_complex() else 0.0
        if not torch.allclose(one, other, rtol=close, atol=close, equal_nan=True):
            raise _Different


def _dtype(like: Tensor) -> torch.dtype:
    """Return the dtype of the outputs of a linear layer with this weight, under autocast too."""
    kind = like.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else like.dtype
