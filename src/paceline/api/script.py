"""The calls of a training script: each speaks to the session of this process, which `init` makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from paceline.api.join import of_thread, open_session, start
from paceline.api.session import Session
from paceline.core.consistency import Consistency
from paceline.data.hashing import Key
from paceline.data.partition import DataCut, Partition
from paceline.data.sharding import shard_source
from paceline.data.slicing import slice_source
from paceline.errors import UsageError
from paceline.model_parallel.parallelize import ParallelizeOptions, keep_part
from paceline.training.arguments import check_distributed
from paceline.training.optimizer import ParameterServer, Settings
from paceline.training.resolve import Policy, choose_strategy
from paceline.training.strategy import Distributed
from paceline.update.table import NonFinite, Scale
from paceline.worker.given import as_number, brief

if TYPE_CHECKING:
    import torch
    from torch import nn

    from paceline.model_parallel.cutting import Placement
    from paceline.model_parallel.losses import Loss, Reduction
    from paceline.model_parallel.parallel import Parallel
    from paceline.model_parallel.pipeline import Schedule

_Source = TypeVar("_Source")


@dataclass(slots=True)
class _Process:
    """The session of this process, for all of its threads."""

    session: Session | None = None
    servers: str | None = None  # what `init` was told of them when it made the session


_process: Final = _Process()


def init(session: Session | None = None, *, servers: str | None = None, timeout_s: float | None = None) -> Session:
    """Join the job this process was started in; run alone, embed one server. A second call changes nothing.

    What `paceline.connect()` has joined without an address is found. The session belongs to the process, whichever of
    its threads calls; a process that is forked from it, or started by it, has none. It is left when the process ends. A
    process of torchrun, srun or mpirun finds its place by itself, as one of `paceline run` does; where it is to be a
    server, this serves until the job is over, and raises SystemExit(0).

    Args:
        session: one that was joined before, for the calls of this script to speak to: what `paceline.connect` returns
            that was given the address of a server of its own.
        servers: where servers are under another launcher than ours: "first:M" are M processes beside rank 0, "node:M"
            are M beside the first rank of every node, "ranks:M" are the last M ranks, "node:M+ranks:N" are both. By
            default what PACELINE_SERVERS says, else "first:1".
        timeout_s: how long this worker waits for others, in any call, before it gives up with `DeadlineExceeded`; at
            least three times the longest step so far. By default what `paceline run --timeout` or PACELINE_TIMEOUT_S
            says, else 600.

    Raises:
        UsageError: another session is given while one is joined, or one that is closed, or with it where servers are;
            or other servers than in the first call.
        PacelineError: the job cannot be joined.

    Example:
        >>> import paceline
        >>> _ = paceline.init()
        >>> paceline.rank(), paceline.size(), paceline.local_rank()
        (0, 1, 0)
    """
    _check_given(session)
    if not isinstance(servers, str | None):  # pyright: ignore[reportUnnecessaryIsInstance] - scripts are not typed
        raise UsageError(f"init: servers is {brief(servers)}, expected 'first:M', 'node:M' or 'ranks:M'.")
    if session is not None and (session.closed or servers is not None):
        problem = "it is closed: connect again" if session.closed else "it has its server: leave out servers=..."
        raise UsageError(f"init was given a session, as worker {session.rank}, and {problem}.")
    known = _known()
    if known is None or known.closed:
        known = session or open_session() or start(servers=servers)
        if of_thread.get(None) is None:
            _process.session, _process.servers = known, servers
        else:
            of_thread.set(known)
    elif servers not in (None, _process.servers):
        raise UsageError(
            f"paceline.init(servers={servers!r}): this process has joined already, with servers={_process.servers!r}, "
            "and a second call changes nothing: give servers in the first, or PACELINE_SERVERS in the environment."
        )
    elif session is not None and session is not known:
        raise UsageError(f"this script speaks to a session already, as worker {known.rank}: close() that one first.")
    known.node.waits.set_timeout(timeout_s)
    return known


def _check_given(session: object) -> None:
    if isinstance(session, str):
        raise UsageError(f"paceline.init({session!r}): an address is for connect: init(connect({session!r})).")
    if session is not None and not isinstance(session, Session):
        raise UsageError(
            f"paceline.init({session!r}): expected nothing, or the session that paceline.connect() returns, and got "
            f"{type(session).__name__}. How many workers there are is said where they are started: "
            "paceline run --workers N script.py."
        )


def bind(session: Session) -> None:
    """Make this the session of the running thread, where workers are threads; `init` finds it."""
    of_thread.set(session)


def current() -> Session:
    """Return the session of this process (of this thread, where workers are threads).

    Raises:
        UsageError: `init` was not called.
    """
    session = _known()
    if session is None:
        raise UsageError("paceline.init() has not been called in this process: call it first.")
    return session


def _known() -> Session | None:
    return of_thread.get(_process.session)


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


def preempted() -> bool:
    """Return whether this process was told to leave: by SIGTERM, SIGUSR1 or SIGUSR2, as machines are taken away.

    Without this call a worker that is told so leaves at the end of its step, and ends with exit code 143. A script
    that has called it sees to that itself: it saves what it wants to keep, and ends, as it likes, soon. Always False
    where the script has handlers of its own for these signals. Does not block.

    Example:
        >>> import paceline
        >>> _ = paceline.init()
        >>> paceline.preempted()
        False
    """
    return current().notice.ask()


def report(*, loss: float | None = None, accuracy: float | None = None) -> None:
    """Tell how training goes: the loss of this clock, or with `accuracy` (0 to 1) a measurement on held-out data.

    Shown in the live progress and in the report; what `paceline tune` compares trials by. Does not block. Where this
    worker was told to leave, as a trial is that others leave behind, it ends here: with a measurement, or before the
    first clock is finished; else it ends where its step does.

    Raises:
        SystemExit: with 143, see `preempted`.
        UsageError: an accuracy without the loss that was measured beside it.

    Example:
        >>> import paceline
        >>> _ = paceline.init()
        >>> paceline.report(loss=0.7)
        >>> paceline.report(loss=0.8, accuracy=0.91)
    """
    session = current()
    clock = session.node.clock
    here = f"report, worker {session.rank}, clock {clock}"
    loss = None if loss is None else as_number(loss, here, "loss")
    accuracy = None if accuracy is None else as_number(accuracy, here, "accuracy")
    if accuracy is None:
        session.meter.note_loss(clock, loss)
    elif loss is None:
        raise UsageError("report(accuracy=...) also needs loss=..., measured on the same data.")
    else:
        session.meter.note_evaluation(clock, loss, accuracy)
    if accuracy is not None or clock == 0:
        session.heed()


def shard(
    source: _Source,
    *,
    seed: int = 0,
    slices: int = 1,
    partition: Partition | None = None,
    shuffle: bool = False,
    key: Callable[[Any], Key] | None = None,
) -> _Source:
    """Return this worker's part of a data source: a `DataLoader`, a dataset, a sequence, a tensor, files, an iterable.

    All workers together see every sample once an epoch. A loader is cut by batches and shuffled by `seed` and epoch,
    the same way on every worker; when its batches do not divide evenly, workers without a last one finish that clock
    empty-handed, so that all stay in step (which takes a step a batch: with gradient accumulation, see to it that they
    divide evenly). Batches that are read while gradients are off, as in `optimizer.snapshot()`, are for evaluation:
    they count as no samples and finish no clock. A loader has `state_dict()` and `load_state_dict(...)`, which say how
    far all have come and let any number of workers continue there.

    With `slices`, workers help one that lags: the batch that a worker has for a clock, `batch_size` samples, is cut in
    so many parts. A worker takes its own first and then those of whoever has most left; `step()` keeps their gradients,
    weighed by samples, and finishes the clock when there is none left. So each clock takes as long as all speeds
    together allow, and each sample still counts once in it, wherever it was computed. Needs an optimizer from
    `distributed` (not under all-reduce) and a `DataLoader` with num_workers=0; `no_grad` loops get whole batches.

    Args:
        source: whose samples, batches of a loader, or files from `paceline.files`, are shared out. Not empty.
        seed: of the shuffle, the same on all workers.
        slices: of a worker's batch.
        partition: "strided" gives worker r of W numbers r, r + W and so on; "contiguous" a run, as long as those of
            others or one longer or shorter; "hashed" whatever has a hash that falls to it, so that a sample stays
            where it is when others are added. By default strided, and files so that all get about as many bytes.
        shuffle: by `seed` before it is cut, the same way for any number of workers. A loader says itself if it is
            shuffled, anew in every epoch.
        key: of a sample (or `Path`), what is hashed: an int, str, bytes or tuple of these. By default its place in the
            source, or the path.

    Raises:
        UsageError: a loader with a custom sampler, or one over an iterable dataset: shard the dataset instead. Or what
            is empty, or cannot be cut so: an iterable in runs, whose length nobody knows, or a loader by hash. Or
            slices of what is no loader, more slices than samples in a batch, or a loop over slices without an optimizer
            that can add up their gradients.

    Example:
        >>> import paceline
        >>> _ = paceline.init()
        >>> paceline.shard(["a", "b", "c"])  # worker 0 of 1 gets everything
        ['a', 'b', 'c']
        >>> sorted(paceline.shard(["a", "b", "c"], shuffle=True, partition="contiguous"))
        ['a', 'b', 'c']
    """
    session, cut = current(), DataCut(partition, shuffle, key)
    sharding = session.sharding(seed)
    if slices != 1:
        return slice_source(source, sharding, slices, session.slicing, cut)
    return shard_source(source, sharding, cut)


def parallelize(
    model: nn.Module,
    *,
    loss: Loss,
    pipeline: int | None = None,
    tensor: int | None = None,
    data: str | None = None,
    micro_batches: int | None = None,
    schedule: Schedule = "1f1b",
    recompute: bool = False,
    balance: Any = None,  # noqa: ANN401 - whatever the model takes
    placement: Placement | None = None,
    reduction: Reduction | None = None,
) -> Parallel:
    """Let several workers hold a model between them: its layers cut into stages, each layer split over ranks.

    Every worker calls it with the same model and keeps its own part; what others hold is freed. Where nothing is asked
    for, here or by the launcher, the whole model is used through the same face. Blocks until all workers have come.

    Args:
        model: a `torch.nn.Sequential` (those inside of it are flattened), or a model with a method `layers()` that
            returns the modules whose composition is its forward; any model where nothing is cut.
        loss: of outputs and targets, one number for the batch: `torch.nn.functional.cross_entropy` for example.
        pipeline: stages that the layers are cut into; by default what the launcher was told, else 1.
        tensor: ranks that each layer is split over; by default what the launcher was told, else 1.
        data: how replicas become one model, "ssp:3" or "all-reduce" for example, where there are several: the workers
            divided by pipeline times tensor. By default what the launcher was told, else the parameter server.
        micro_batches: that a batch is cut into on its way through the stages, which must divide it. By default four a
            stage, or the next lower number that divides the batch.
        schedule: "1f1b" runs each backward as soon as it can, and keeps the activations of no more micro-batches than
            there are stages; "gpipe" runs all forwards first.
        recompute: keep only the input of each layer, and run it again for backward, with the same random numbers.
        balance: inputs to measure each layer with, on worker 0, so that stages take the same time; without it they get
            about the same number of parameters.
        placement: where to cut instead: the stage of layers by the beginning of their names, {"features": 0,
            "classifier": 1}, or a list of where each stage after the first begins.
        reduction: how the loss of a batch follows from those of its micro-batches: "mean", "sum", or for a mean what
            the targets of a micro-batch weigh, `lambda targets: (targets >= 0).sum()` for example. By default what
            losses of torch say of themselves (`reduction`, `ignore_index`, `weight`). Any other loss is taken once
            of the whole batch, which keeps the activations of all micro-batches as "gpipe" does.

    Raises:
        UsageError: a model that cannot be cut so, workers that do not divide, or threads where processes are needed.
        PeerError: a worker is gone.

    Example:
        >>> import torch, paceline
        >>> _ = paceline.init()
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 1))
        >>> model = paceline.parallelize(model, loss=torch.nn.functional.mse_loss)
        >>> isinstance(model.forward_backward(torch.ones(4, 2), torch.ones(4, 1)), float)
        True
    """
    session = current()
    asked = ParallelizeOptions(
        pipeline, tensor, data, micro_batches, schedule, recompute, balance, placement, reduction
    )
    return keep_part(model, loss, asked, session.exchange, session.arrangement)


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
    name: str | None = None,
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
            for values when its forward begins (in a `Sequential`, child by child) instead of in `step`; until then all
            parameters are those of the step before. Where some are views, or not of the model, `step` waits. For links
            that are slow beside the computation. A backward that is not the last of its step then belongs inside
            `with optimizer.accumulate()`, gradients are not to be changed after backward, and each bucket is a push
            of its own: one that is not finite leaves the others' updates as they are.
        model: if given, its floating-point buffers (BatchNorm statistics) are averaged over the workers too, and its
            names are used in messages.
        name: of the table on the servers; unique in the job. By default "model", and for further calls "model-2" and so
            on, the same on all workers that make these calls in the same order; so a notebook can run a cell again,
            and goes on from the values that the model has.

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
    check_distributed(optimizer, model, strategy, consistency, fetch_every, name)
    served = (consistency or session.consistency) is not None
    chosen = choose_strategy(strategy, session.arrangement.between_replicas(served=served))
    name = session.tables.default_name("model") if name is None else name
    if consistency is not None and chosen != ParameterServer():
        raise UsageError(f"'{name}' is told both {chosen} and consistency={consistency!r}, which is for servers.")
    policy = session.policy(consistency)
    settings = Settings(policy, scale or session.scale or "samples", fetch_every, nonfinite, name, views, overlap)
    return session.distributed(optimizer, model=model, settings=settings, strategy=chosen)
