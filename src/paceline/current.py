"""The calls of a training script: each speaks to the session of this process, which `init` makes."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeVar

from paceline.core.consistency import Consistency
from paceline.data.sharding import shard_source
from paceline.errors import UsageError
from paceline.session import Session, connect
from paceline.tensors.table import NonFinite, Scale
from paceline.training.choice import Policy, choose_strategy
from paceline.training.optimizer import ParameterServer, Settings
from paceline.training.strategy import Distributed

if TYPE_CHECKING:
    import torch
    from torch import nn

_Source = TypeVar("_Source")

# The session that `init` made. A context variable, so that workers that are threads of one process have one each.
_current: ContextVar[Session] = ContextVar("paceline_session")


def init() -> Session:
    """Join the job this process was started in; run alone, embed one server. A second call changes nothing.

    The session is left when the process ends.

    Example:
        >>> import paceline
        >>> _ = paceline.init()
        >>> paceline.rank(), paceline.size(), paceline.local_rank()
        (0, 1, 0)
    """
    session = _current.get(None)
    if session is None or session.closed:
        session = connect()
        _current.set(session)
    return session


def bind(session: Session) -> None:
    """Make this the session of the running context, so that `init` finds it."""
    _current.set(session)


def current() -> Session:
    """Return the session of this process (of this thread, where workers are threads).

    Raises:
        UsageError: `init` was not called.
    """
    session = _current.get(None)
    if session is None:
        raise UsageError("paceline.init() has not been called in this process: call it first.")
    return session


def rank() -> int:
    """Return the number of this worker, from 0.

    Example:
        >>> import paceline
        >>> _ = paceline.init()
        >>> paceline.rank()
        0
    """
    return current().rank


def size() -> int:
    """Return the number of workers that were started.

    Example:
        >>> import paceline
        >>> _ = paceline.init()
        >>> paceline.size()
        1
    """
    return current().size


def local_rank() -> int:
    """Return the number of this worker among those on its machine, from 0: which accelerator to take, for example.

    Example:
        >>> import paceline
        >>> _ = paceline.init()
        >>> paceline.local_rank()
        0
    """
    return current().local_rank


def barrier() -> None:
    """Block until every worker that still takes part has called this, and all pushes are applied.

    Example:
        >>> import paceline
        >>> _ = paceline.init()
        >>> paceline.barrier()
    """
    current().barrier()


def report(*, loss: float | None = None, accuracy: float | None = None) -> None:
    """Tell how training goes: the loss of this clock, or with `accuracy` (0 to 1) a measurement on held-out data.

    Shown in the live progress and in the report. Does not block.

    Raises:
        UsageError: an accuracy without the loss that was measured beside it.

    Example:
        >>> import paceline
        >>> _ = paceline.init()
        >>> paceline.report(loss=0.7)
        >>> paceline.report(loss=0.8, accuracy=0.91)
    """
    session = current()
    if accuracy is None:
        session.meter.loss = loss
    elif loss is None:
        raise UsageError("report(accuracy=...) also needs loss=..., measured on the same data.")
    else:
        session.meter.note_evaluation(session.node.clock, loss, accuracy)


def shard(source: _Source, *, seed: int = 0) -> _Source:
    """Return this worker's part of a data source: a `DataLoader`, a dataset, a sequence, a tensor or an iterable.

    All workers together see every sample once an epoch. A loader is cut by batches and shuffled by `seed` and epoch,
    the same way on every worker; when its batches do not divide evenly, workers without a last one finish that clock
    empty-handed, so that all stay in step (which takes a step a batch: with gradient accumulation, see to it that they
    divide evenly). Batches that are read while gradients are off, as in `optimizer.snapshot()`, are for evaluation:
    they count as no samples and finish no clock.

    Raises:
        UsageError: a loader with a custom sampler, or one over an iterable dataset: shard the dataset instead.

    Example:
        >>> import paceline
        >>> _ = paceline.init()
        >>> paceline.shard(["a", "b", "c"])  # worker 0 of 1 gets everything
        ['a', 'b', 'c']
    """
    return shard_source(source, current().sharding(seed))


def distributed(
    optimizer: torch.optim.Optimizer,
    *,
    strategy: Policy | Mapping[str, Policy] | None = None,
    consistency: Consistency | str | None = None,
    scale: Scale | None = None,
    fetch_every: int | None = 1,
    nonfinite: NonFinite = "reject",
    views: bool | None = None,
    overlap: bool = False,
    model: nn.Module | None = None,
    name: str = "model",
) -> Distributed:
    """Move an optimizer's update to the servers: the one changed line of an ordinary training loop.

    The result is used like the optimizer it wraps: `zero_grad`, `step`, `param_groups`, schedulers, `state_dict`. Its
    parameters are set to those of worker 0 at once. `step()` pushes this worker's gradients, finishes its clock and
    fetches values; it blocks as long as the consistency asks for. Clip gradients before `step`: that clips each
    worker's own.

    Args:
        optimizer: any `torch.optim` optimizer that steps without a closure; its class and numbers go to the servers.
        strategy: "parameter-server" by default, or what the launcher was told with --strategy, "ssp:3" for example;
            see `paceline.all_reduce`, which needs `model` and knows `scale`, `nonfinite` and `name`. Or a policy for
            each pattern of parameter names, {"embedding.*": "ssp:3", "*": "all-reduce"}: the first that matches counts.
        consistency: bsp() by default, or what the launcher was told with --consistency.
        scale: what one update applies of the workers' gradients: the mean weighted by "samples" (default; the counts
            come from `shard`, or from `step(samples=...)`), the plain "mean", or the "sum". Under ssp and asynchronous
            each push is an update of its own and is applied in full with the given learning rate.
        fetch_every: fetch values from the servers every n-th step; in between, and with None always, use the copy at
            hand until the staleness bound forces a fetch.
        nonfinite: a gradient with NaN or infinity is dropped and counted ("reject"), zeroed there ("zero"), or ends
            the worker ("halt"); "ignore" applies it as it is and saves the look.
        views: let the parameters be views of the servers' own memory where that is on this machine (shm), so that
            nothing is copied to read them. By default under bsp, where values change only while all workers wait.
            Elsewhere updates of others then show in the middle of a step: values are never too old, but not of one
            moment. What a script writes to such a parameter itself is gone with the next step, as without views.
        overlap: send gradients while backward still runs, in buckets of some MB, and where `model` is given wait
            for values when its forward begins (in a `Sequential`, child by child) instead of in `step`. For links that
            are slow beside the computation. A backward that is not the last of its step then belongs inside
            `with optimizer.accumulate()`, gradients are not to be changed after backward, and each bucket is a push
            of its own: one that is not finite leaves the others' updates as they are.
        model: if given, its floating-point buffers (BatchNorm statistics) are averaged over the workers too, and its
            names are used in messages.
        name: of the table on the servers; unique in the job.

    Raises:
        Refused: another worker has a different model or optimizer; the first differences are listed.
        UsageError: an optimizer that cannot run on a server, with the reason.

    Example:
        >>> import torch, paceline
        >>> _ = paceline.init()
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = paceline.distributed(torch.optim.SGD(model.parameters(), lr=0.1), name="doc")
        >>> model(torch.ones(2)).sum().backward()
        >>> optimizer.step()
    """
    session = current()
    chosen = choose_strategy(strategy, session.distribution)
    if consistency is not None and chosen != ParameterServer():
        raise UsageError(f"'{name}' is told both {chosen} and consistency={consistency!r}, which is for servers.")
    policy = session.policy(consistency)
    settings = Settings(policy, scale or session.scale or "samples", fetch_every, nonfinite, name, views, overlap)
    return session.distributed(optimizer, model=model, settings=settings, strategy=chosen)
