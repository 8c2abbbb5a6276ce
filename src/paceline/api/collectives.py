"""Patterns of communication by name, on tensors: among the workers of a job, and with its servers."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Literal, TypeVar, overload

from paceline.api.script import current
from paceline.collective.signature import Op
from paceline.errors import DeadlineExceeded, UsageError
from paceline.training.all_reduce import AllReduce

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.worker.pushes import PushOutcome

T = TypeVar("T")


@overload
def broadcast(
    tensor: Tensor, root: int = 0, *, later: Literal[False] = False, timeout_s: float | None = None
) -> Tensor: ...


@overload
def broadcast(
    tensor: Tensor, root: int = 0, *, later: Literal[True], timeout_s: float | None = None
) -> Future[Tensor]: ...


def broadcast(
    tensor: Tensor, root: int = 0, *, later: bool = False, timeout_s: float | None = None
) -> Tensor | Future[Tensor]:
    """Give every worker the tensor of one of them, the root.

    What is given stays as it is; that of the others says shape and dtype. Dense or sparse, of any dtype. Blocks until
    this worker has it.

    Args:
        tensor: of the same shape and dtype on all workers.
        root: the worker whose tensor it is.
        later: return a future at once, which `paceline.wait` ends; leave the tensor as it is until then.
        timeout_s: until the others have to come; by default as long as any wait of the job.

    Raises:
        UsageError: workers make different calls; the message says which.
        DeadlineExceeded: a worker has not come in time; the message names it.
        PeerError: a worker is gone.

    Example:
        >>> import torch, paceline
        >>> _ = paceline.init()
        >>> paceline.broadcast(torch.tensor([1.0, 2.0]), root=0)
        tensor([1., 2.])
    """
    exchange = current().exchange
    future = exchange.broadcast(tensor, root, timeout_s)
    return future if later else exchange.finish(future, "broadcast", timeout_s)


@overload
def reduce(
    tensor: Tensor, root: int = 0, *, op: Op = "sum", later: Literal[False] = False, timeout_s: float | None = None
) -> Tensor | None: ...


@overload
def reduce(
    tensor: Tensor, root: int = 0, *, op: Op = "sum", later: Literal[True], timeout_s: float | None = None
) -> Future[Tensor | None]: ...


def reduce(
    tensor: Tensor, root: int = 0, *, op: Op = "sum", later: bool = False, timeout_s: float | None = None
) -> Tensor | Future[Tensor | None] | None:
    """Give one worker, the root, the sum of the tensors of all workers; the others get None.

    What is given stays as it is. Blocks until this worker's part is done, which for the root is the sum. Half-precision
    numbers are added as float32 and rounded once. Sparse tensors are gathered by all and summed.

    Args:
        tensor: of the same shape and dtype on all workers; sparse ones may have values elsewhere.
        root: the worker that gets it.
        op: "sum", "mean", "min", "max" or "product"; only the first two for sparse and complex tensors.
        later: return a future at once, which `paceline.wait` ends; leave the tensor as it is until then.
        timeout_s: until the others have to come; by default as long as any wait of the job.

    Raises:
        UsageError, DeadlineExceeded, PeerError: as `paceline.broadcast`.

    Example:
        >>> import torch, paceline
        >>> _ = paceline.init()
        >>> paceline.reduce(torch.tensor([1.0, 2.0]), root=0)  # worker 0 of 1
        tensor([1., 2.])
    """
    exchange = current().exchange
    future = exchange.reduce(tensor, root, op, timeout_s)
    return future if later else exchange.finish(future, "reduce", timeout_s)


@overload
def all_reduce(*, unused: bool = False, bucket_mb: float = 25.0) -> AllReduce: ...


@overload
def all_reduce(
    tensor: Tensor, *, op: Op = "sum", later: Literal[False] = False, timeout_s: float | None = None
) -> Tensor: ...


@overload
def all_reduce(
    tensor: Tensor, *, op: Op = "sum", later: Literal[True], timeout_s: float | None = None
) -> Future[Tensor]: ...


def all_reduce(
    tensor: Tensor | None = None,
    *,
    op: Op = "sum",
    later: bool = False,
    timeout_s: float | None = None,
    unused: bool = False,
    bucket_mb: float = 25.0,
) -> Tensor | Future[Tensor] | AllReduce:
    """Give every worker the sum of the tensors of all; without a tensor, name that as a strategy of training.

    What is given stays as it is. Blocks until this worker has the sum. Every worker gets the same bits, and sends and
    receives 2(n-1)/n times the bytes of the tensor. Half-precision numbers are added as float32 and rounded once.
    Sparse tensors are gathered by all and summed.

    As a strategy: `paceline.distributed(optimizer, strategy=paceline.all_reduce(), model=model)` lets every worker keep
    and step the whole model, with the mean of all workers' gradients, which travel while backward runs
    (DistributedDataParallel beneath). One process with the whole batch computes the same.

    Args:
        tensor: of the same shape and dtype on all workers; sparse ones may have values elsewhere.
        op: "sum", "mean", "min", "max" or "product"; only the first two for sparse and complex tensors.
        later: return a future at once, which `paceline.wait` ends; leave the tensor as it is until then.
        timeout_s: until the others have to come; by default as long as any wait of the job.
        unused: of the strategy: some parameters may not take part in every forward, which costs a walk through the
            graph each time.
        bucket_mb: of the strategy: how much travels together.

    Raises:
        UsageError: workers make different calls; the message says which.
        DeadlineExceeded: a worker has not come in time; the message names it.
        PeerError: a worker is gone.

    Example:
        >>> import torch, paceline
        >>> _ = paceline.init()
        >>> paceline.all_reduce(torch.tensor([1.0, 2.0]))  # of one worker
        tensor([1., 2.])
        >>> model = torch.nn.Linear(2, 1)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = paceline.distributed(sgd, strategy=paceline.all_reduce(), model=model, name="all")
        >>> model(torch.ones(2)).sum().backward()
        >>> optimizer.step()
    """
    if tensor is None:
        return AllReduce(unused, bucket_mb)
    exchange = current().exchange
    future = exchange.all_reduce(tensor, op, timeout_s)
    return future if later else exchange.finish(future, "all_reduce", timeout_s)


@overload
def all_gather(tensor: Tensor, *, later: Literal[False] = False, timeout_s: float | None = None) -> list[Tensor]: ...


@overload
def all_gather(tensor: Tensor, *, later: Literal[True], timeout_s: float | None = None) -> Future[list[Tensor]]: ...


def all_gather(
    tensor: Tensor, *, later: bool = False, timeout_s: float | None = None
) -> list[Tensor] | Future[list[Tensor]]:
    """Give every worker the tensors of all workers, by rank.

    Dense or sparse, of any dtype. Blocks until this worker has them.

    Args:
        tensor: of the same shape and dtype on all workers; sparse ones may have values elsewhere.
        later: return a future at once, which `paceline.wait` ends; leave the tensor as it is until then.
        timeout_s: until the others have to come; by default as long as any wait of the job.

    Raises:
        UsageError, DeadlineExceeded, PeerError: as `paceline.broadcast`.

    Example:
        >>> import torch, paceline
        >>> _ = paceline.init()
        >>> paceline.all_gather(torch.tensor([1.0, 2.0]))  # of one worker
        [tensor([1., 2.])]
    """
    exchange = current().exchange
    future = exchange.all_gather(tensor, timeout_s)
    return future if later else exchange.finish(future, "all_gather", timeout_s)


@overload
def push(name: str, tensor: Tensor, *, later: Literal[False] = False) -> None: ...


@overload
def push(name: str, tensor: Tensor, *, later: Literal[True]) -> Future[PushOutcome]: ...


def push(name: str, tensor: Tensor, *, later: bool = False) -> Future[PushOutcome] | None:
    """Add a tensor to the one of this name on the servers; the first push makes it. No other worker takes part.

    Blocks until it is added. For tables with an update rule, a consistency or rows, see `paceline.Session.table`.

    Args:
        name: of the tensor, unique in the job.
        tensor: dense, of a floating-point dtype, and of the shape and dtype of the first push.
        later: return a future at once, which `paceline.wait` ends; the tensor may be changed all the same.

    Raises:
        UsageError: the tensor is not of the shape and dtype of this worker's first, or not finite.
        Refused: another worker has made it with another shape or dtype.
        PeerError: a server is gone.

    Example:
        >>> import torch, paceline
        >>> _ = paceline.init()
        >>> paceline.push("counts", torch.tensor([1.0, 0.0]))
        >>> paceline.push("counts", torch.tensor([1.0, 3.0]))
        >>> paceline.pull("counts")
        tensor([2., 3.])
    """
    future = current().named.push(name, tensor)
    if later:
        return future
    wait(future, timeout_s=current().node.waits.limit_s)
    return None


@overload
def pull(name: str, *, later: Literal[False] = False) -> Tensor: ...


@overload
def pull(name: str, *, later: Literal[True]) -> Future[Tensor]: ...


def pull(name: str, *, later: bool = False) -> Tensor | Future[Tensor]:
    """Return the tensor of this name from the servers: the sum of all pushes that had ended when it was asked for.

    Blocks until somebody has pushed to it for the first time, and until it is here.

    Args:
        name: of the tensor.
        later: return a future, which `paceline.wait` ends, once somebody has pushed to it for the first time.

    Raises:
        DeadlineExceeded: nobody has pushed to it in time.
        PeerError: a server is gone.

    Example:
        >>> import torch, paceline
        >>> _ = paceline.init()
        >>> paceline.push("total", torch.tensor(2.0))
        >>> paceline.pull("total")
        tensor(2.)
    """
    named = current().named
    return named.pull_later(name) if later else named.pull(name)


@overload
def wait(future: Future[T], /, *, timeout_s: float | None = None) -> T: ...


@overload
def wait(first: Future[T], second: Future[T], /, *more: Future[T], timeout_s: float | None = None) -> list[T]: ...


def wait(*futures: Future[T], timeout_s: float | None = None) -> T | list[T]:
    """Return what a call made with `later=True` gives, or a list of it for several; blocks until it is there.

    Raises what the call raises, which has a deadline of its own.

    Args:
        futures: of `paceline` calls in any order; also those of a table's `push` and `pull_later`.
        timeout_s: give up sooner; the calls go on, and may be waited for again.

    Raises:
        DeadlineExceeded: `timeout_s` is over.

    Example:
        >>> import torch, paceline
        >>> _ = paceline.init()
        >>> total = paceline.all_reduce(torch.ones(2), later=True)
        >>> paceline.wait(total)  # after some computation
        tensor([1., 1.])
    """
    if not futures:
        raise UsageError("wait() got nothing to wait for: give it the futures of calls with later=True.")
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    results: list[T] = []
    for index, future in enumerate(futures):
        try:
            results.append(future.result(None if deadline_s is None else max(0.0, deadline_s - time.monotonic())))
        except TimeoutError:
            if future.done():
                raise
            raise DeadlineExceeded(
                f"worker {current().rank} waited {timeout_s:g} s for call {index + 1} of {len(futures)}, which is not "
                "over yet"
            ) from None
    return results[0] if len(futures) == 1 else results
