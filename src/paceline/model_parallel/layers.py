"""A model as a sequence of layers, each fed with the output of the one before, and where it is cut into stages."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, runtime_checkable

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.model_parallel.balance import balanced_ends
from paceline.model_parallel.tensor_plan import has_hooks
from paceline.model_parallel.traces import changeable, unchanged_buffers
from paceline.torch_private import submodules, tree_leaves, tree_map_only

if TYPE_CHECKING:
    from paceline.model_parallel.mesh import Mesh


@runtime_checkable
class Layered(Protocol):
    """A model that names its own layers."""

    def layers(self) -> Sequence[nn.Module]:
        """Return modules whose composition is the forward of the model."""
        ...


@runtime_checkable
class Resettable(Protocol):
    """A module that can draw new initial parameters."""

    def reset_parameters(self) -> None:
        """Draw them."""
        ...


class ModelLayer(msgspec.Struct, frozen=True):
    """One layer, by the name it has in its model."""

    name: str
    module: nn.Module

    @property
    def num_parameters(self) -> int:
        """Number of elements of its parameters."""
        return sum(parameter.numel() for parameter in self.module.parameters())


def layers_of(model: nn.Module) -> list[ModelLayer]:
    """Return the layers of a `Sequential`, those inside of it flattened, or of a model that has a method `layers`.

    A `Sequential` inside that has hooks stays one layer, so that they are called.

    Raises:
        UsageError: another kind of model, one with hooks of its own, or `layers` leaves parameters out.

    Example:
        >>> inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> [layer.name for layer in layers_of(nn.Sequential(inner, nn.Linear(2, 1)))]
        ['0.0', '0.1', '1']
    """
    if has_hooks(model):
        raise UsageError(
            f"a {type(model).__name__} with hooks cannot be split: its layers are called, and not the model itself. "
            "Give the hooks to its first or last layer."
        )
    if type(model) is nn.Sequential:
        return _flattened(model, "")
    if not isinstance(model, Layered) or "layers" in dict(model.named_children()):
        raise UsageError(
            f"a {type(model).__name__} cannot be split: expected a torch.nn.Sequential, or a model with a method "
            "layers() that returns the modules whose composition is its forward."
        )
    names = {id(module): name for name, module in model.named_modules()}
    found = [ModelLayer(names.get(id(module), f"layer{index}"), module) for index, module in enumerate(model.layers())]
    held = {id(parameter) for layer in found for parameter in layer.module.parameters()}
    lost = [name for name, parameter in model.named_parameters() if id(parameter) not in held]
    if lost:
        raise UsageError(
            f"{type(model).__name__}.layers() leaves out parameters of the model: {', '.join(lost[:5])}. Its layers "
            "must be all that forward does, one after the other."
        )
    return found


def _flattened(model: nn.Sequential, prefix: str) -> list[ModelLayer]:
    layers: list[ModelLayer] = []
    for key, module in submodules(model).items():
        assert module is not None, "a Sequential has only modules"
        if type(module) is nn.Sequential and not has_hooks(module):
            layers.extend(_flattened(module, f"{prefix}{key}."))
        else:
            layers.append(ModelLayer(f"{prefix}{key}", module))
    return layers


def starts_of(layers: Sequence[ModelLayer]) -> list[int]:
    """Return the layers that a stage after the first may begin with.

    These have parameters, and no parameter is shared by a layer before them and one from there on.

    Example:
        >>> first, last = nn.Linear(2, 2), nn.Linear(2, 2)
        >>> layers = [ModelLayer(str(n), one) for n, one in enumerate((first, nn.Tanh(), nn.Linear(2, 2), last))]
        >>> starts_of(layers)
        [2, 3]
        >>> last.weight = first.weight
        >>> starts_of(layers)
        []
    """
    spans: dict[int, tuple[int, int]] = {}  # the first and the last layer that has each parameter
    for index, layer in enumerate(layers):
        for parameter in layer.module.parameters():
            spans[id(parameter)] = (spans.get(id(parameter), (index, index))[0], index)
    learning = [index for index, layer in enumerate(layers) if layer.num_parameters][1:]
    return [start for start in learning if not any(first < start <= last for first, last in spans.values())]


def require_apart(layers: Sequence[ModelLayer], ends: Sequence[int]) -> None:
    """Raise UsageError when stages share a parameter: each would learn its own."""
    owners: dict[int, tuple[int, str]] = {}
    for stage, layer in _by_stage(layers, ends):
        for name, parameter in layer.module.named_parameters(layer.name):
            other, first = owners.setdefault(id(parameter), (stage, name))
            if other != stage:
                raise UsageError(
                    f"'{first}' of stage {other} and '{name}' of stage {stage} are one parameter: stages cannot "
                    "share any. Untie them, or let one stage hold both (placement=...)."
                )


def _by_stage(layers: Sequence[ModelLayer], ends: Sequence[int]) -> Iterator[tuple[int, ModelLayer]]:
    return ((bisect_right(ends, index), layer) for index, layer in enumerate(layers))


class SharedBuffer(msgspec.Struct, frozen=True):
    """A buffer of this stage that another stage has, too."""

    owner: nn.Module
    name: str  # in its owner
    told: str  # what both are, for an error

    @property
    def values(self) -> Tensor:
        """Those that it has now."""
        return self.owner.get_buffer(self.name)


def shared_buffers(layers: Sequence[ModelLayer], ends: Sequence[int], stage: int) -> list[SharedBuffer]:
    """Return the buffers of a stage that another one has, too; each stage then has its own.

    Example:
        >>> norm = nn.BatchNorm1d(2, affine=False)
        >>> layers = layers_of(nn.Sequential(nn.Linear(2, 2), norm, nn.Linear(2, 2), norm))
        >>> [each.told for each in shared_buffers(layers, [2, 4], 1)][0]
        "'3.running_mean' of stage 1 and '1.running_mean' of stage 0"
    """
    own: dict[int, tuple[nn.Module, str, str]] = {}
    others: dict[int, str] = {}
    for at, layer in _by_stage(layers, ends):
        for path, module in layer.module.named_modules(prefix=layer.name):
            for name, buffer in module.named_buffers(recurse=False):
                told = f"'{path}.{name}' of stage {at}"
                if at == stage:
                    own.setdefault(id(buffer), (module, name, told))
                else:
                    others.setdefault(id(buffer), told)
    return [
        SharedBuffer(module, name, f"{told} and {others[key]}")
        for key, (module, name, told) in own.items()
        if key in others
    ]


@contextmanager
def only_read(shared: Sequence[SharedBuffer]) -> Generator[None]:
    """Raise UsageError where the block changes a buffer that another stage has, too."""
    before = [each.values.clone() for each in shared]
    yield
    for each, values in zip(shared, before, strict=True):
        if not _are_same(each.values, values):
            raise UsageError(
                f"{each.told} are one buffer, which training changes: each stage would have its own. Give each a "
                "buffer, or let one stage hold both (placement=...)."
            )


def _are_same(values: Tensor, before: Tensor) -> bool:
    """Return whether values are those of before, where NaN is NaN.

    >>> _are_same(torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.nan]))
    True
    """
    if values.layout != torch.strided:
        values, before = values.to_dense(), before.to_dense()
    return values.shape == before.shape and bool(((values == before) | (values.isnan() & before.isnan())).all())


def tree_of(layers: Sequence[ModelLayer], *, training: bool = True) -> nn.Module:
    """Return a module that holds these layers under the names that they have in their model.

    Args:
        layers: some of the model.
        training: the mode of the module itself; layers keep theirs.
    """
    root = nn.Module()
    root.training = training
    for layer in layers:
        *path, last = layer.name.split(".")
        holder = root
        for step in path:
            if step not in dict(holder.named_children()):
                holder.add_module(step, nn.Module())
            holder = holder.get_submodule(step)
        holder.add_module(last, layer.module)
    return root


def drop(layers: Sequence[ModelLayer], kept: Sequence[ModelLayer]) -> None:
    """Free the memory of layers that other workers hold: their tensors move to the meta device."""
    own = {id(module) for layer in kept for module in layer.module.modules()}
    for layer in layers:
        if own.isdisjoint(map(id, layer.module.modules())):
            layer.module.to("meta")


def materialise(model: nn.Module) -> None:
    """Allocate and initialize modules that were built on the meta device.

    Raises:
        UsageError: a module with parameters has no `reset_parameters`.
    """
    for name, module in model.named_modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if not any(tensor.is_meta for tensor in own):
            continue
        resettable: object = module
        if not isinstance(resettable, Resettable):
            raise UsageError(
                f"'{name}', a {type(module).__name__}, was built on the meta device and has no reset_parameters() to "
                "draw initial values: give it one, or build the model on the CPU."
            )
        module.to_empty(device="cpu", recurse=False)
        with torch.no_grad():
            resettable.reset_parameters()


Placement: TypeAlias = Mapping[str, int] | Sequence[int]

_NUM_TIMES: Final = 3


def ends_of(layers: Sequence[ModelLayer], placement: Placement | None, sample: Any, mesh: Mesh) -> list[int]:  # noqa: ANN401
    """Return the ends of the stages: the number of the layer after each, in rising order.

    Args:
        layers: layers of the whole model.
        placement: stages that the script names, if it does.
        sample: inputs to measure the time of each layer with, on worker 0; None to use the number of parameters.
        mesh: mesh of all workers.

    Raises:
        UsageError: a stage would have no layers or no parameters, or the placement is not valid.
    """
    num_stages = mesh.grid.pipeline
    if num_stages > len(layers):
        raise UsageError(
            f"{num_stages} stages for {len(layers)} layers ({_listed(layers)}): each stage needs at least one layer."
        )
    if isinstance(placement, Mapping):
        ends = placed(layers, placement, num_stages)
    elif placement is not None:
        ends = given(layers, placement, num_stages)
    else:
        ends = balanced(layers, costs_of(layers, sample, mesh), num_stages)
    for stage, (start, end) in enumerate(pairwise([0, *ends])):
        if not any(layer.num_parameters for layer in layers[start:end]):
            raise UsageError(
                f"stage {stage} of {num_stages} has no parameters to learn, only {_listed(layers[start:end])}: cut "
                "elsewhere (placement=...), or take fewer stages."
            )
    return ends


def given(layers: Sequence[ModelLayer], starts: Sequence[int], num_stages: int) -> list[int]:
    """Return the ends of stages, given the first layer of each stage but the first.

    >>> given([ModelLayer(str(n), nn.Identity()) for n in range(5)], [2, 3], num_stages=3)
    [2, 3, 5]
    """
    edges = [0, *starts, len(layers)]
    if len(starts) != num_stages - 1 or any(a >= b for a, b in pairwise(edges)):
        raise UsageError(
            f"placement {list(starts)} does not cut {len(layers)} layers into {num_stages} stages: expected "
            f"{num_stages - 1} rising numbers from 1 to {len(layers) - 1}, where each stage after the first begins."
        )
    return edges[1:]


def placed(layers: Sequence[ModelLayer], placement: Mapping[str, int], num_stages: int) -> list[int]:
    """Return the ends of stages, given the stage of layers by prefix of their names.

    A layer without a prefix is in the stage of the layer before it.

    >>> layers = [ModelLayer(name, nn.Identity()) for name in ("features.0", "features.1", "flatten", "classifier")]
    >>> placed(layers, {"features": 0, "classifier": 1}, num_stages=2)
    [3, 4]
    """
    stages: list[int] = []
    unused = set(placement)
    for layer in layers:
        names = [name for name in placement if layer.name == name or layer.name.startswith(f"{name}.")]
        unused.difference_update(names)
        stages.append(placement[max(names, key=len)] if names else stages[-1] if stages else 0)
    if unused:
        raise UsageError(f"placement names {', '.join(sorted(unused))}, but the layers are {_listed(layers)}.")
    if stages != sorted(stages) or set(stages) != set(range(num_stages)):
        said = ", ".join(f"{layer.name}: {stage}" for layer, stage in zip(layers, stages, strict=True))
        raise UsageError(
            f"placement puts the layers on the stages {said}; expected stages 0 to {num_stages - 1}, each of them, "
            "in the order of the layers."
        )
    return [stages.index(stage) for stage in range(1, num_stages)] + [len(layers)]


def balanced(layers: Sequence[ModelLayer], costs: Sequence[float], num_stages: int) -> list[int]:
    """Return the ends of stages whose largest cost is smallest; each stage has parameters.

    Layers that share a parameter stay in one stage, with those between them.

    >>> layers = [ModelLayer(str(n), layer) for n, layer in enumerate((nn.Linear(1, 1), nn.Tanh(), nn.Linear(1, 1)))]
    >>> balanced(layers, [1.0, 5.0, 2.0], num_stages=2)
    [2, 3]
    """
    edges = [0, *starts_of(layers), len(layers)]
    if num_stages > len(edges) - 1:
        raise UsageError(
            f"{num_stages} stages, but of the layers {_listed(layers)} only {len(edges) - 1} have parameters to learn "
            "that no layer before them shares, and each stage needs one."
        )
    ends = balanced_ends([sum(costs[start:end]) for start, end in pairwise(edges)], num_stages)
    return [edges[end] for end in ends]


def costs_of(layers: Sequence[ModelLayer], sample: Any, mesh: Mesh) -> list[float]:  # noqa: ANN401
    """Return the cost of each layer: seconds measured by worker 0, or without a sample the number of parameters."""
    if sample is None:
        return [float(layer.num_parameters) for layer in layers]
    costs = torch.zeros(len(layers), dtype=torch.float64)
    if mesh.worker_set.rank == 0:
        costs.copy_(torch.tensor(measured(layers, sample)))
    with mesh.explained("the cost of layers"):
        dist.broadcast(costs, src=0)
    return costs.tolist()


def measured(layers: Sequence[ModelLayer], sample: Any) -> list[float]:  # noqa: ANN401
    """Return the seconds of forward and backward of each layer, the best of a few times; the model is not changed."""
    values, costs = sample, list[float]()
    for layer in layers:
        if any(tensor.is_meta for tensor in layer.module.parameters()):
            raise UsageError(f"the cost of '{layer.name}' cannot be measured on the meta device: leave out balance=...")
        times: list[tuple[float, Any]] = []
        for _ in range(1 + _NUM_TIMES):
            with torch.random.fork_rng(devices=[]), unchanged_buffers(layer.module):
                times.append(_timed(layer.module, values))
        costs.append(min(time_s for time_s, _ in times))
        values = times[-1][1]
    return costs


def _timed(module: nn.Module, values: Any) -> tuple[float, Any]:  # noqa: ANN401
    """Return the seconds of one forward and backward, and the outputs."""
    leaves = tree_map_only(Tensor, lambda one: one.detach().clone().requires_grad_(one.is_floating_point()), values)
    began_s = time.perf_counter()
    found = module(tree_map_only(Tensor, changeable, leaves))
    inputs, outputs = _learning(leaves), _learning(found)
    learned = [one for one in module.parameters() if one.requires_grad]
    if outputs:
        ones = [torch.ones_like(one) for one in outputs]
        torch.autograd.grad(outputs, [*inputs, *learned], ones, allow_unused=True)
    return time.perf_counter() - began_s, tree_map_only(Tensor, Tensor.detach, found)


def _learning(values: Any) -> list[Tensor]:  # noqa: ANN401
    return [one for one in tree_leaves(values) if isinstance(one, Tensor) and one.requires_grad]


def _listed(layers: Sequence[ModelLayer]) -> str:
    names = [layer.name for layer in layers]
    return ", ".join(names if len(names) < 8 else [*names[:4], "...", *names[-2:]])
