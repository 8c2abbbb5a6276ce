"""The collective operations as calls of torch.distributed, run on a queue's thread after all workers have agreed."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Final

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, Work

from paceline.collective.call_queue import QueuedCall
from paceline.collective.signature import MOVED_ALONE, Op
from paceline.errors import UsageError
from paceline.torch_private import AllgatherOptions, AllreduceOptions, BroadcastOptions, ReduceOptions
from paceline.update.dtypes import dtype_name

# Dtypes that Gloo cannot add, or would round after each addition, are added as another dtype and rounded once.
_ADDED_AS: Final = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.int16: torch.int32,
}
_REDUCE: Final = {
    "sum": ReduceOp(ReduceOp.SUM),
    "mean": ReduceOp(ReduceOp.SUM),
    "min": ReduceOp(ReduceOp.MIN),
    "max": ReduceOp(ReduceOp.MAX),
    "product": ReduceOp(ReduceOp.PRODUCT),
}


def require_reducible(tensor: Tensor, op: Op, pattern: str) -> None:
    """Raise UsageError for unsupported reductions: of `MOVED_ALONE`, means of integers, min of sparse tensors."""
    if not isinstance(op, str) or op not in _REDUCE:  # pyright: ignore[reportUnnecessaryIsInstance] - not typed
        raise UsageError(f"{pattern} has the op {op!r}, expected one of {', '.join(_REDUCE)}.")
    whole = not (tensor.is_floating_point() or tensor.is_complex())
    sums = ("sum", "mean")
    if tensor.dtype in MOVED_ALONE or (whole and op == "mean"):
        raise UsageError(
            f"{pattern} ({op}) got a tensor of {dtype_name(tensor.dtype)}: convert it first, .double() say."
        )
    if op not in sums and (tensor.is_complex() or tensor.layout != torch.strided):
        kind = "complex" if tensor.is_complex() else "sparse"
        raise UsageError(f"{pattern} ({op}) got a {kind} tensor, which has only {' and '.join(sums)}.")


def values_of(tensor: Tensor) -> Tensor:
    """Return a tensor without its gradient, in whose memory are its values: a view of `conj` has those of another.

    >>> values_of(torch.tensor([1 + 2j]).conj()).view(torch.float32)
    tensor([ 1., -2.])
    """
    given = tensor.detach()
    if given.layout != torch.strided:
        return given
    given = given.resolve_conj().resolve_neg()
    # One value counts as contiguous whatever its strides are, which do not let its bytes be seen.
    return given.as_strided(given.shape, (1,) * given.ndim) if given.numel() == 1 else given


def broadcast(queued: QueuedCall, tensor: Tensor) -> Tensor:
    """Return the root's tensor."""
    root, own = queued.call.root, queued.group.worker_set.rank
    if not queued.call.sparse_dim:
        return broadcast_tensor(queued, tensor.clone() if own == root else torch.empty_like(tensor), root)
    num_values = queued.calls[root].num_values
    indices, values = tensor.indices(), tensor.values()
    if own != root:
        indices = indices.new_empty((indices.shape[0], num_values))
        values = values.new_empty((num_values, *values.shape[1:]))
    return _sparse(broadcast_tensor(queued, indices, root), broadcast_tensor(queued, values, root), queued.call.shape)


def all_gather(queued: QueuedCall, tensor: Tensor) -> list[Tensor]:
    """Return the tensors of all workers, by rank."""
    if not queued.call.sparse_dim:
        return _gather(queued, tensor)
    most = max(call.num_values for call in queued.calls)
    indices = _gather(queued, _padded(tensor.indices().t(), most))
    values = _gather(queued, _padded(tensor.values(), most))
    return [
        _sparse(where[: call.num_values].t(), what[: call.num_values], call.shape)
        for where, what, call in zip(indices, values, queued.calls, strict=True)
    ]


def all_reduce(queued: QueuedCall, tensor: Tensor) -> Tensor:
    """Return the reduction of the tensors of all workers."""
    if queued.call.sparse_dim:
        return _sum_sparse(all_gather(queued, tensor), queued.call.op)
    work = _addable(tensor)
    reduce_in_place(queued, work)
    return _result(work, tensor, queued)


def reduce(queued: QueuedCall, tensor: Tensor) -> Tensor | None:
    """Return the reduction of the tensors of all workers, to the root; None to the others."""
    is_root = queued.group.worker_set.rank == queued.call.root
    if queued.call.sparse_dim:
        gathered = all_gather(queued, tensor)
        return _sum_sparse(gathered, queued.call.op) if is_root else None
    work = _addable(tensor)
    options = ReduceOptions()
    options.reduceOp, options.rootRank = _REDUCE[queued.call.op], queued.call.root

    def begin(group: ProcessGroup, left: timedelta) -> Work | None:
        options.timeout = left
        return group.reduce([work], options) if work.numel() else None

    queued.run(begin)
    return _result(work, tensor, queued) if is_root else None


def reduce_in_place(queued: QueuedCall, tensor: Tensor) -> None:
    """Replace a contiguous tensor on the CPU by the reduction of those of all workers."""
    options = AllreduceOptions()
    options.reduceOp = _REDUCE[queued.call.op]

    def begin(group: ProcessGroup, left: timedelta) -> Work | None:
        options.timeout = left
        return group.allreduce([tensor], options) if tensor.numel() else None

    queued.run(begin)


def broadcast_bytes(queued: QueuedCall, own: bytes, root: int) -> bytes:
    """Return the bytes of one worker; `num_values` of each signature is the number of its own bytes."""
    if queued.group.worker_set.rank == root:
        broadcast_tensor(queued, torch.frombuffer(bytearray(own), dtype=torch.uint8), root)
        return own
    return bytes(broadcast_tensor(queued, torch.zeros(queued.calls[root].num_values, dtype=torch.uint8), root).tolist())


def broadcast_tensor(queued: QueuedCall, tensor: Tensor, root: int) -> Tensor:
    """Return the tensor of one worker; those of the others have the same shape and dtype."""
    host = tensor.cpu().contiguous()
    options = BroadcastOptions()
    options.rootRank = root

    def begin(group: ProcessGroup, left: timedelta) -> Work | None:
        options.timeout = left
        return group.broadcast([_bytes(host)], options) if host.numel() else None

    queued.run(begin)
    return host.to(tensor.device)


def _gather(queued: QueuedCall, tensor: Tensor) -> list[Tensor]:
    """Return the tensors of all workers, which have the same shape."""
    host = tensor.cpu().contiguous()
    found = [torch.empty_like(host) for _ in queued.calls]
    options = AllgatherOptions()

    def begin(group: ProcessGroup, left: timedelta) -> Work | None:
        options.timeout = left
        return group.allgather([[_bytes(one) for one in found]], [_bytes(host)], options) if host.numel() else None

    queued.run(begin)
    return [one.to(tensor.device) for one in found]


def _bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as uint8: data that is only moved may have any dtype."""
    return tensor.view(-1).view(torch.uint8)


def _addable(tensor: Tensor) -> Tensor:
    """Return a copy on the CPU that Gloo can add."""
    host = tensor.to("cpu", _ADDED_AS.get(tensor.dtype, tensor.dtype), copy=True).contiguous()
    return torch.view_as_real(host) if host.is_complex() else host


def _result(work: Tensor, given: Tensor, queued: QueuedCall) -> Tensor:
    """Return a reduction in the dtype and on the device of the given tensor."""
    if queued.call.op == "mean":
        work.div_(len(queued.calls))
    return (torch.view_as_complex(work) if given.is_complex() else work).to(given.device, given.dtype)


def _sum_sparse(tensors: Sequence[Tensor], op: Op) -> Tensor:
    """Return the sum or mean of sparse tensors; values of one index are added in the order of ranks."""
    first = tensors[0]
    dtype = _ADDED_AS.get(first.dtype, first.dtype)
    indices = torch.cat([tensor.indices() for tensor in tensors], dim=1)
    values = torch.cat([tensor.values().to(dtype) for tensor in tensors])
    total = _sparse(indices, values, first.shape).coalesce()
    mean = total.values() / len(tensors) if op == "mean" else total.values()
    return _sparse(total.indices(), mean.to(first.dtype), first.shape).coalesce()


def _padded(tensor: Tensor, length: int) -> Tensor:
    """Return a tensor with zeros up to this length of its first dimension."""
    return torch.cat([tensor, tensor.new_zeros((length - tensor.shape[0], *tensor.shape[1:]))])


def _sparse(indices: Tensor, values: Tensor, shape: Sequence[int]) -> Tensor:
    made = torch.sparse_coo_tensor(indices, values, tuple(shape), check_invariants=False)
    return made.coalesce()
