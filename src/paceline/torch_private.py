"""What Paceline uses of torch that torch does not promise: what each is for, under a public name, and nowhere else.

All of it is in torch 2.10, the oldest that is accepted, and in 2.13; what a newer torch moves is mended here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

# Stores and Gloo, of which `torch.distributed` has the same objects, but not for a type checker.
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    BroadcastOptions,
    FileStore,
    GradBucket,
    HashStore,
    PrefixStore,
    ProcessGroup,
    ProcessGroupGloo,
    ReduceOptions,
    Store,
    TCPStore,
)
from torch._utils import _flatten_dense_tensors  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType]
from torch.autograd import Variable, profiler
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,  # pyright: ignore[reportPrivateUsage]
    _global_optimizer_pre_hooks,  # pyright: ignore[reportPrivateUsage]
)

# Tensors inside of nested structures, as arguments of modules and states of optimizers are.
from torch.utils._pytree import (
    TreeSpec,
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
    from torch.nn.parallel import DistributedDataParallel

__all__ = [
    "DYNAMO",
    "FUSED_ADAGRAD",
    "FUSED_ADAM",
    "FUSED_ADAMW",
    "FUSED_SGD",
    "AllgatherOptions",
    "AllreduceOptions",
    "AnyBatchNorm",
    "BroadcastOptions",
    "FileStore",
    "GradBucket",
    "HashStore",
    "PrefixStore",
    "ProcessGroupGloo",
    "ReduceOptions",
    "Store",
    "TCPStore",
    "TreeSpec",
    "after_forward",
    "before_forward",
    "buffers_of",
    "call_after_backward",
    "flatten_tensors",
    "gloo_backend",
    "gpipe",
    "group_over",
    "has_one_width",
    "is_profiling",
    "is_view",
    "post_step_hooks",
    "pre_step_hooks",
    "remove_backward_hooks",
    "saved_buffers",
    "submodules",
    "tree_flatten",
    "tree_leaves",
    "tree_map_only",
    "tree_unflatten",
    "treespec_dumps",
    "treespec_loads",
    "uncompiled",
    "version_of",
]

# -- tensors and steps of optimizers ---------------------------------------------------------------------------------

# A step over several tensors in one call, on CPUs as well.
FUSED_SGD: Final[Callable[..., object]] = torch._fused_sgd_  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
FUSED_ADAM: Final[Callable[..., object]] = torch._fused_adam_  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
FUSED_ADAMW: Final[Callable[..., object]] = torch._fused_adamw_  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
FUSED_ADAGRAD: Final[Callable[..., object]] = torch._fused_adagrad_  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]

# Copies tensors one after the other into a new one, in one call.
flatten_tensors: Final[Callable[[Sequence[Tensor]], Tensor]] = _flatten_dense_tensors

# How often a tensor was changed in place; a C function, as it is asked in each step.
version_of: Final[Callable[[Tensor], int]] = attrgetter("_version")

# Whether a tensor shares the memory of another one, which autograd treats otherwise when it is changed in place.
is_view: Final[Callable[[Tensor], bool]] = methodcaller("_is_view")

# Whether a profiler is on, which steps of optimizers tell of themselves; a C function likewise.
is_profiling: Final[Callable[[], bool]] = partial(attrgetter("_is_profiler_enabled"), profiler)

# Hooks around the steps of all optimizers, which torch calls where it wraps `step`.
pre_step_hooks: Final[Mapping[int, object]] = _global_optimizer_pre_hooks
post_step_hooks: Final[Mapping[int, object]] = _global_optimizer_post_hooks

DYNAMO: Final = "torch._dynamo"  # the module that any torch optimizer imports when it is created, which takes a second


# -- modules ---------------------------------------------------------------------------------------------------------

AnyBatchNorm: Final = _BatchNorm  # what all kinds of it are


def submodules(module: nn.Module) -> Mapping[str, nn.Module | None]:
    """Return the modules directly inside, by name; unlike those of `named_children`, one may be in it twice."""
    return module._modules  # pyright: ignore[reportPrivateUsage]


def buffers_of(module: nn.Module) -> Mapping[str, Tensor | None]:
    """Return the buffers directly inside, by name; unlike `named_buffers`, with those that are None for now."""
    return module._buffers  # pyright: ignore[reportPrivateUsage]


def saved_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers directly inside that are saved with the module, by name."""
    for name, buffer in module._buffers.items():  # pyright: ignore[reportPrivateUsage]
        if buffer is not None and name not in module._non_persistent_buffers_set:  # pyright: ignore[reportPrivateUsage]
            yield name, buffer


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the model that `torch.compile` was given, whose names have no prefix; any other module as it is."""
    inner = submodules(module).get("_orig_mod") if type(module).__module__.startswith(DYNAMO) else None
    return module if inner is None else inner


def has_one_width(attention: nn.MultiheadAttention) -> bool:
    """Return whether queries, keys and values are as wide as each other, so that one matrix projects them."""
    return attention._qkv_same_embed_dim  # pyright: ignore[reportPrivateUsage]


# -- backward, and DistributedDataParallel around a forward that is not its own --------------------------------------


def call_after_backward(call: Callable[[], None]) -> None:
    """Have a function called when the backward that runs now is over; only from within a hook."""
    Variable._execution_engine.queue_callback(call)  # pyright: ignore[reportPrivateUsage]


def before_forward(ddp: DistributedDataParallel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
    """Do what DDP does ahead of its module; return the inputs of the module."""
    return ddp._pre_forward(*args, **kwargs)  # pyright: ignore[reportPrivateUsage]


def after_forward(ddp: DistributedDataParallel, output: object) -> Any:  # noqa: ANN401
    """Do what DDP does after its module; return the output."""
    return ddp._post_forward(output)  # pyright: ignore[reportPrivateUsage]


def remove_backward_hooks(ddp: DistributedDataParallel) -> None:
    """Have DDP combine no gradients any more, so that another one can."""
    ddp.reducer._remove_autograd_hooks()


# -- pipelines -------------------------------------------------------------------------------------------------------


def gpipe(stage: PipelineStage, num: int, loss: Callable[..., Tensor]) -> ScheduleGPipe:
    """Return a schedule of `num` micro-batches, whose losses are not scaled; they may be fewer than the stages.

    It has no need of more, but older versions of torch refuse to make one.
    """
    from torch.distributed.pipelining import ScheduleGPipe  # takes a second

    made = ScheduleGPipe(stage, max(num, stage.num_stages), loss_fn=loss, scale_grads=False)
    made._n_microbatches = num  # pyright: ignore[reportPrivateUsage]
    return made


# -- process groups --------------------------------------------------------------------------------------------------


def gloo_backend(store: Store, rank: int, size: int, address: str, timeout: timedelta) -> ProcessGroupGloo:
    """Return Gloo's connections at one address of this machine; blocks until all are there.

    Without options, torch resolves the name of the machine to find an address.
    """
    options = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue] - newer ones have two names
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timeout
    backend = ProcessGroupGloo(store, rank, size, options)
    # One that left at once would look as if it had died to one that still connects.
    backend.barrier().wait()  # pyright: ignore[reportAttributeAccessIssue] - its type does not name it
    return backend


def group_over(backend: ProcessGroupGloo, store: Store, rank: int, size: int) -> ProcessGroup:
    """Return a process group over a backend that is not registered globally: a process may have several."""
    group = ProcessGroup(store, rank, size)
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        group._register_backend(torch.device(device), ProcessGroup.BackendType.GLOO, backend)
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    return group
