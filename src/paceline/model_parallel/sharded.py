"""Fully sharded models: each rank holds a slice of every parameter, and a layer is whole only while it runs."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import prod
from typing import Any, Final
from weakref import WeakSet

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

from paceline.collective.process_group import OwnGroup
from paceline.errors import UsageError
from paceline.model_parallel.split_layers import RankShare
from paceline.torch_private import is_view, tree_map_only
from paceline.transport.buffers import fresh_buffer
from paceline.update.dtypes import dtype_name

Guard = Callable[[], AbstractContextManager[None]]

_REUSED_BYTES: Final = 32 << 20  # up to here glibc may keep what is freed; beyond, it gives memory back to the system


class SliceCall(msgspec.Struct, frozen=True):
    """A collective call of the ranks during forward or backward.

    Args:
        guard: context of the call, which explains failures.
    """

    guard: Guard = nullcontext

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for inputs or outputs: on a host in large pages, where it would be new pages each time."""
        size_bytes = prod(size) * dtype.itemsize
        if device.type != "cpu" or size_bytes <= _REUSED_BYTES:
            return torch.empty(size, dtype=dtype, device=device)
        return torch.frombuffer(fresh_buffer(size_bytes), dtype=dtype).view(*size)


class GatherSlices(SliceCall, frozen=True):
    """All-gather of slices."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> None:
        """Gather; blocks until all ranks call it."""
        del async_op
        with self.guard():
            dist.all_gather(list(output_tensor.chunk(group.size())), input_tensor, group=group)


class ScatterSums(SliceCall, frozen=True):
    """Reduce-scatter of gradients: each rank gets its slice of the sum.

    Gloo's own is an all-reduce, which sends 2 (n-1)/n times the gradients. So over Gloo each rank sends every other
    rank its slice, (n-1)/n times the gradients, and sums the received slices.

    Args:
        peers: the ranks that keep the same slice in other groups, whose sums are added; None where there are none.
    """

    peers: ProcessGroup | None = None

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: object, async_op: bool = False
    ) -> None:
        """Sum; blocks until all ranks call it."""
        del async_op
        if isinstance(group, OwnGroup):
            with self.guard():
                dist.reduce_scatter(output_tensor, list(input_tensor.chunk(group.size())), group=group)
        else:
            slices = self.allocate(input_tensor.shape, dtype=input_tensor.dtype, device=input_tensor.device)
            with self.guard():
                dist.all_to_all_single(slices, input_tensor, group=group)
            torch.sum(slices.view(group.size(), -1), 0, out=output_tensor.view(-1))
        if self.peers is not None:
            with self.guard():
                dist.all_reduce(output_tensor, group=self.peers)
        if op == ReduceOp.AVG:
            output_tensor.div_(group.size())


_HOOKS = "_state_dict_pre_hooks"  # torch's attribute of modules
_gathered: Final = WeakSet[nn.Module]()  # models that are whole on this worker for a while


def shard_fully(
    model: nn.Module, mesh: DeviceMesh, guard: Guard = nullcontext, peers: ProcessGroup | None = None
) -> None:
    """Shard every parameter of a model over the ranks, in place; blocks until all ranks call it.

    Values are those of the first rank of the mesh, or of the first group. Parameters become `DTensor`s, so make
    optimizers afterwards. Layers of a `Sequential` or `ModuleList` are gathered one by one when they run, other
    parameters with the model. Backward leaves slices of the mean of the ranks' gradients in `.grad`, added up over the
    groups where there are several. All ranks run forward and backward together.

    Args:
        model: the module whose forward is called.
        mesh: of the ranks that keep slices, 1-D.
        guard: context of each collective call, which explains failures.
        peers: the ranks that keep the same slices in other groups; None where there are none, or each learns by itself.

    Raises:
        UsageError: a model without parameters, with several dtypes, or that is sharded.
    """
    parameters = list(model.parameters())
    dtypes = {dtype_name(parameter.dtype) for parameter in parameters}
    if len(dtypes) != 1 or is_sharded(model):
        what = "is sharded already" if is_sharded(model) else f"has parameters of {' and '.join(dtypes) or 'no dtype'}"
        raise UsageError(
            f"fsdp: {type(model).__name__} {what}; expected a model of one dtype, not sharded: to distribute it again, "
            "make the model anew and load its state."
        )
    scalar = next((name for name, parameter in model.named_parameters() if parameter.dim() == 0), None)
    if scalar is not None:
        raise UsageError(
            f"fsdp: parameter '{scalar}' of {type(model).__name__} has shape (), which cannot be sliced: give it "
            "shape (1,)."
        )
    empty = {parameter for parameter in parameters if not parameter.numel()}  # which torch does not slice
    share = RankShare.of(mesh)
    dense = [buffer for buffer in model.buffers() if buffer.layout == torch.strided]  # others stay with each rank
    with torch.no_grad():
        for tensor in (*parameters, *dense):
            tensor.data = tensor.data.contiguous()  # torch slices only contiguous tensors
            if peers is not None:
                dist.broadcast(tensor.data, src=dist.get_global_rank(peers, 0), group=peers)
            share.copy_from_first(tensor.data)
    for layer in (*_blocks(model), model):
        layer.register_forward_hook(_without_views)
        sharded = fully_shard(layer, mesh=mesh, ignored_params=empty)
        sharded.set_custom_all_gather(GatherSlices(guard))  # pyright: ignore[reportArgumentType] - torch hides the bases
        sharded.set_custom_reduce_scatter(ScatterSums(guard, peers))  # pyright: ignore[reportArgumentType]


def is_sharded(model: nn.Module) -> bool:
    """Return whether a model is sharded."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


@contextmanager
def gathered(model: nn.Module) -> Generator[None]:
    """Gather a sharded model for a `with` block, in which forward needs no other rank.

    Blocks until all ranks enter it; each then needs memory for the whole model. `state_dict` is whole, too, and leaves
    the model gathered.
    """
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        module.unshard()
    _gathered.add(model)
    hooks = _without_slicing(model)
    for module in modules[1:]:  # the first is the root, which stays gathered after forward
        module.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        _gathered.discard(model)
        for module, own in hooks.items():
            setattr(module, _HOOKS, own)
        for module in modules[1:]:
            module.set_reshard_after_forward(True, recurse=False)
        for module in modules:
            module.reshard()


def is_gathered(model: nn.Module) -> bool:
    """Return whether a model is gathered as a whole, so that its forward needs no other rank."""
    return model in _gathered


def _without_slicing(model: nn.Module) -> dict[nn.Module, dict[int, object]]:
    """Remove torch's hooks that reshard a model before `state_dict`; return the hooks of each module."""
    found: dict[nn.Module, dict[int, object]] = {module: getattr(module, _HOOKS) for module in model.modules()}
    for module, hooks in found.items():
        others = {key: hook for key, hook in hooks.items() if not hook.__module__.startswith("torch.distributed.fsdp.")}
        setattr(module, _HOOKS, OrderedDict(others))
    return found


def local_slice(tensor: Tensor) -> Tensor:
    """Return this rank's slice of a sharded tensor; another one as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def slice_of(parameter: Tensor, local: Tensor) -> Tensor:
    """Return a tensor in the shape of this rank's slice of a parameter as a slice of a whole one; another as it is."""
    if not isinstance(parameter, DTensor) or local.shape != parameter.to_local().shape:
        return local
    mesh, shape, stride = parameter.device_mesh, parameter.shape, parameter.stride()
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


def sliced_like(parameter: Tensor, tensor: Tensor) -> Tensor:
    """Return this rank's slice of a whole tensor, sliced like a parameter."""
    if not isinstance(parameter, DTensor) or tensor.shape != parameter.shape:
        return tensor
    mesh = parameter.device_mesh
    slices = tensor.chunk(mesh.size(), 0)
    rank = mesh.get_local_rank()
    own = slices[rank].clone() if rank < len(slices) else tensor[:0].clone()
    return DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=tensor.shape, stride=tensor.stride())


def _without_views(layer: nn.Module, inputs: object, outputs: Any) -> Any:  # noqa: ANN401 - whatever it returns
    """Copy outputs that are views: a change in place would detach them from torch's hooks."""
    del layer, inputs
    if not torch.is_grad_enabled():
        return outputs
    return tree_map_only(Tensor, lambda one: one.clone() if is_view(one) else one, outputs)


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Return the layers to gather separately: the outermost ones of a chain, without shared parameters."""
    found = list(_in_chains(model))
    holders = Counter(id(parameter) for block in found for parameter in block.parameters())
    inside = {id(module) for block in found for module in block.modules()}
    for module in model.modules():
        if id(module) not in inside:
            holders.update(id(parameter) for parameter in module.parameters(recurse=False))
    return [block for block in found if all(holders[id(parameter)] == 1 for parameter in block.parameters())]


def _in_chains(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of the outermost chains in a module that have parameters."""
    is_chain = isinstance(module, nn.Sequential | nn.ModuleList)
    for child in module.children():
        if is_chain and not isinstance(child, nn.ModuleList | nn.ModuleDict) and any(True for _ in child.parameters()):
            yield child
        else:
            yield from _in_chains(child)
