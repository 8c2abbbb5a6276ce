"""The public collective calls (broadcast, reduce, all_reduce, all_gather), send, push and pull by name, and `wait`."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Literal, TypeVar, overload

from paceline.api.script import current
from paceline.collective.signature import Op
from paceline.core.calls import checked_late
from paceline.errors import DeadlineExceeded, UsageError
from paceline.transport.deadline import patience_s
from paceline.worker.validation import brief

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


@checked_late
def broadcast(
    tensor: Tensor, root: int = 0, *, later: bool = False, timeout_s: float | None = None
) -> Tensor | Future[Tensor]:
    """Return the root's tensor on every worker.

    The argument is not changed; on workers other than the root it gives shape and dtype. Dense or sparse, of any dtype.
    Blocks until this worker has the result.

    Args:
        tensor: of the same shape and dtype on all workers.
        root: rank of the worker whose tensor is sent.
        later: return a future at once, for `paceline.wait`; leave the tensor as it is until then.
        timeout_s: how long to wait for the other workers. Default: the limit of all waits of the job.

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


@checked_late
def reduce(
    tensor: Tensor, root: int = 0, *, op: Op = "sum", later: bool = False, timeout_s: float | None = None
) -> Tensor | Future[Tensor | None] | None:
    """Return the sum of all workers' tensors on one worker, the root, and None on the others.

    The argument is not changed. Blocks until this worker's part is done, which for the root is the sum. Half-precision
    numbers are added as float32 and rounded once. Sparse tensors are gathered by all workers and summed.

    Args:
        tensor: of the same shape and dtype on all workers; sparse ones may have values elsewhere.
        root: rank of the worker that gets the sum.
        op: "sum", "mean", "min", "max" or "product"; only the first two for sparse and complex tensors.
        later: return a future at once, for `paceline.wait`; leave the tensor as it is until then.
        timeout_s: how long to wait for the other workers. Default: the limit of all waits of the job.

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
def all_reduce(
    tensor: Tensor, *, op: Op = "sum", later: Literal[False] = False, timeout_s: float | None = None
) -> Tensor: ...


@overload
def all_reduce(
    tensor: Tensor, *, op: Op = "sum", later: Literal[True], timeout_s: float | None = None
) -> Future[Tensor]: ...


@checked_late
def all_reduce(
    tensor: Tensor, *, op: Op = "sum", later: bool = False, timeout_s: float | None = None
) -> Tensor | Future[Tensor]:
    """Return the sum of all workers' tensors on every worker.

    The argument is not changed. Blocks until this worker has the sum. Every worker gets the same bits, and sends and
    receives 2(n-1)/n times the bytes of the tensor. Half-precision numbers are added as float32 and rounded once.
    Sparse tensors are gathered by all workers and summed.

    The strategy of that name, for a training loop, is `paceline.strategies.all_reduce`.

    Args:
        tensor: of the same shape and dtype on all workers; sparse ones may have values elsewhere.
        op: "sum", "mean", "min", "max" or "product"; only the first two for sparse and complex tensors.
        later: return a future at once, for `paceline.wait`; leave the tensor as it is until then.
        timeout_s: how long to wait for the other workers. Default: the limit of all waits of the job.

    Raises:
        UsageError: workers make different calls; the message says which.
        DeadlineExceeded: a worker has not come in time; the message names it.
        PeerError: a worker is gone.

    Example:
        >>> import torch, paceline
        >>> _ = paceline.init()
        >>> paceline.all_reduce(torch.tensor([1.0, 2.0]))  # of one worker
        tensor([1., 2.])
    """
    exchange = current().exchange
    future = exchange.all_reduce(tensor, op, timeout_s)
    return future if later else exchange.finish(future, "all_reduce", timeout_s)


@overload
def all_gather(tensor: Tensor, *, later: Literal[False] = False, timeout_s: float | None = None) -> list[Tensor]: ...


@overload
def all_gather(tensor: Tensor, *, later: Literal[True], timeout_s: float | None = None) -> Future[list[Tensor]]: ...


@checked_late
def all_gather(
    tensor: Tensor, *, later: bool = False, timeout_s: float | None = None
) -> list[Tensor] | Future[list[Tensor]]:
    """Return the tensors of all workers on every worker, by rank.

    Dense or sparse, of any dtype. Blocks until this worker has them.

    Args:
        tensor: of the same shape and dtype on all workers; sparse ones may have values elsewhere.
        later: return a future at once, for `paceline.wait`; leave the tensor as it is until then.
        timeout_s: how long to wait for the other workers. Default: the limit of all waits of the job.

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
def send(tensor: Tensor, to: int, *, later: Literal[False] = False, timeout_s: float | None = None) -> None: ...


@overload
def send(tensor: Tensor, to: int, *, later: Literal[True], timeout_s: float | None = None) -> Future[None]: ...


@checked_late
def send(tensor: Tensor, to: int, *, later: bool = False, timeout_s: float | None = None) -> Future[None] | None:
    """Send a tensor to one other worker, which calls `paceline.receive`. No other worker takes part.

    Blocks until the two are connected, which the first call of each does, and the tensor has left. What one worker
    sends to another arrives in order.

    Args:
        tensor: dense, of any dtype and shape.
        to: rank of the other worker.
        later: return a future at once, for `paceline.wait`; leave the tensor as it is until then.
        timeout_s: how long to wait for the other worker. Default: the limit of all waits of the job.

    Raises:
        DeadlineExceeded: the other worker has not come in time.
        PeerError: the other worker is gone.

    Example:
        >>> import torch, paceline
        >>> _ = paceline.init()
        >>> if paceline.size() > 1 and paceline.rank() == 0:
        ...     paceline.send(torch.ones(2), to=1)
    """
    future = current().exchange.messages.send(tensor, to, timeout_s)
    return future if later else future.result()


@overload
def receive(
    source: int, like: Tensor | None = None, *, later: Literal[False] = False, timeout_s: float | None = None
) -> Tensor: ...


@overload
def receive(
    source: int, like: Tensor | None = None, *, later: Literal[True], timeout_s: float | None = None
) -> Future[Tensor]: ...


@checked_late
def receive(
    source: int, like: Tensor | None = None, *, later: bool = False, timeout_s: float | None = None
) -> Tensor | Future[Tensor]:
    """Return the next tensor that one other worker has sent to this one with `paceline.send`; blocks for it.

    Args:
        source: rank of the other worker.
        like: a tensor of the shape and dtype that are expected; the result is on its device. Default: any, on the host.
        later: return a future at once, for `paceline.wait`.
        timeout_s: how long to wait for the other worker. Default: the limit of all waits of the job.

    Raises:
        UsageError: the tensor that came has another shape or dtype; the next call goes on with the one after it.
        DeadlineExceeded: the other worker has not sent one in time.
        PeerError: the other worker is gone.

    Example:
        >>> import torch, paceline
        >>> _ = paceline.init()
        >>> if paceline.size() > 1 and paceline.rank() == 1:
        ...     paceline.receive(source=0)
    """
    future = current().exchange.messages.receive(source, like, timeout_s)
    return future if later else future.result()


@overload
def push(name: str, tensor: Tensor, *, later: Literal[False] = False) -> None: ...


@overload
def push(name: str, tensor: Tensor, *, later: Literal[True]) -> Future[PushOutcome]: ...


@checked_late
def push(name: str, tensor: Tensor, *, later: bool = False) -> Future[PushOutcome] | None:
    """Add a tensor to the one of this name on the servers; the first push creates it. No other worker takes part.

    Blocks until it is added. For tables with an update rule, a consistency or rows, see `paceline.Session.table`.

    Args:
        name: name of the tensor, unique in the job.
        tensor: dense, of a floating-point dtype, and of the shape and dtype of the first push.
        later: return a future at once, for `paceline.wait`; the tensor may be changed meanwhile.

    Raises:
        UsageError: the tensor differs in shape or dtype from this worker's first push, or is not finite.
        Refused: another worker has created it with another shape or dtype.
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


@checked_late
def pull(name: str, *, later: bool = False) -> Tensor | Future[Tensor]:
    """Return the tensor of this name from the servers: the sum of all pushes that had returned before this call.

    Blocks until the first push to it by any worker, and until the values have arrived.

    Args:
        name: name of the tensor.
        later: return a future, for `paceline.wait`, after the first push to it by any worker.

    Raises:
        DeadlineExceeded: no worker has pushed to it in time.
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


@checked_late
def wait(*futures: Future[T], timeout_s: float | None = None) -> T | list[T]:
    """Return the result of a call made with `later=True`, or a list of results for several; blocks until it is there.

    Raises what the call raises; each call also has a deadline of its own.

    Args:
        futures: of `paceline` calls in any order, or of a table's `push` and `pull_later`.
        timeout_s: a shorter limit for this wait; the calls continue, and can be waited for again.

    Raises:
        DeadlineExceeded: `timeout_s` has passed.

    Example:
        >>> import torch, paceline
        >>> _ = paceline.init()
        >>> total = paceline.all_reduce(torch.ones(2), later=True)
        >>> paceline.wait(total)  # after some computation
        tensor([1., 1.])
    """
    if not futures:
        raise UsageError("wait() got nothing to wait for: give it the futures of calls with later=True.")
    for index, future in enumerate(futures):
        if not isinstance(future, Future):  # pyright: ignore[reportUnnecessaryIsInstance] - scripts are not typed
            raise UsageError(
                f"wait: argument {index + 1} of {len(futures)} is {brief(future)}, expected the future of a call with "
                "later=True."
            )
    timeout_s = None if timeout_s is None else patience_s(timeout_s)
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
