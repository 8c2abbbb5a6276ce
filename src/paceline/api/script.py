"""The calls of a training script. Each uses the session of this process, which `init` makes.

What only one of these calls needs is imported by that call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, overload

from paceline.api.join import open_session, start, thread_session
from paceline.api.session import Session
from paceline.core.calls import checked, checked_late
from paceline.errors import UsageError
from paceline.update.user_code import require_no_import
from paceline.worker.validation import as_number, brief

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.utils.data import DataLoader

    from paceline.core.consistency import Consistency
    from paceline.data.partition import Key, Partition
    from paceline.data.sharding import PositionedLoader
    from paceline.model_parallel.layers import Placement
    from paceline.model_parallel.losses import Loss, Reduction
    from paceline.model_parallel.parallelize import Parallel
    from paceline.model_parallel.pipeline import Schedule
    from paceline.snapshots.taking import ResumedFrom
    from paceline.training.arguments import StrategyLike
    from paceline.training.strategy import Distributed
    from paceline.update.table import NonFinite, Scale

_Source = TypeVar("_Source")
_Sample = TypeVar("_Sample")
_LONGEST_NAME: Final = 100  # of a reported value


@dataclass(slots=True)
class _ScriptSession:
    """The session of this process, for all of its threads."""

    session: Session | None = None
    servers: str | None = None  # the argument of the `init` that made the session


_script: Final = _ScriptSession()


@checked
def init(session: Session | None = None, *, servers: str | None = None, timeout_s: float | None = None) -> Session:
    """Join the job this process was started in; without a launcher, embed one server. A second call changes nothing.

    A session that `paceline.connect()` made without an address is reused. The session belongs to the process and is
    shared by its threads; child processes, forked or spawned, do not inherit it. It is closed when the process ends.
    Under torchrun, srun and mpirun the process finds its place as under `paceline run`. If that place is a server's,
    this call serves until the job is over, and raises SystemExit(0). Blocks until all servers have accepted it.

    Args:
        session: the session that the calls of this script use, from `paceline.connect` with an address.
        servers: where the servers run under another launcher: "first:M" for M processes beside rank 0, "node:M" for M
            beside the first rank of every node, "ranks:M" for the last M ranks, "node:M+ranks:N" for both. Default:
            PACELINE_SERVERS, else "first:1".
        timeout_s: how long this worker waits for others, in any call, before it raises `DeadlineExceeded`; at least
            three times the longest step so far. Default: `paceline run --timeout` or PACELINE_TIMEOUT_S, else 600.

    Raises:
        UsageError: the session is closed, or not the one in use; or `servers` comes with a session, or differs from the
            first call.
        PacelineError: the job cannot be joined.

    Example:
        >>> import paceline
        >>> _ = paceline.init()
        >>> paceline.rank(), paceline.size(), paceline.local_rank()
        (0, 1, 0)
    """
    require_no_import()
    _check_given(session)
    if not isinstance(servers, str | None):  # pyright: ignore[reportUnnecessaryIsInstance] - scripts are not typed
        raise UsageError(f"init: servers is {brief(servers)}, expected 'first:M', 'node:M' or 'ranks:M'.")
    if session is not None and (session.closed or servers is not None):
        problem = "it is closed: connect again" if session.closed else "it has its server: leave out servers=..."
        raise UsageError(f"init was given a session, as worker {session.rank}, and {problem}.")
    known = _known()
    if known is None or known.closed:
        known = session or open_session() or start(servers=servers)
        if thread_session.get(None) is None:
            _script.session, _script.servers = known, servers
        else:
            thread_session.set(known)
    elif servers not in (None, _script.servers):
        raise UsageError(
            f"paceline.init(servers={servers!r}): this process has joined already, with servers={_script.servers!r}, "
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
    """Make this the session of the current thread, where workers are threads; `init` returns it."""
    thread_session.set(session)


def current() -> Session:
    """Return the session of this process (of this thread, where workers are threads).

    Raises:
        UsageError: `init` was not called.
    """
    session = _known()
    if session is None:
        raise UsageError(
            "paceline.init() has not been called in this process: call it first, or paceline.init(ps) after "
            "ps = paceline.connect()."
        )
    return session


def _known() -> Session | None:
    return thread_session.get(_script.session)


@checked_late
def rank() -> int:
    """Return the rank of this worker, from 0.

    Example:
        >>> import paceline
        >>> _ = paceline.init()
        >>> paceline.rank()
        0
    """
    return current().rank


@checked_late
def size() -> int:
    """Return the number of workers that were started.

    Example:
        >>> import paceline
        >>> _ = paceline.init()
        >>> paceline.size()
        1
    """
    return current().size


@checked_late
def local_rank() -> int:
    """Return the rank of this worker among those on its machine, from 0; it selects an accelerator, for example.

    Example:
        >>> import paceline
        >>> _ = paceline.init()
        >>> paceline.local_rank()
        0
    """
    return current().local_rank


@checked_late
def barrier() -> None:
    """Block until every live worker has called this, and all pushes are applied.

    Example:
        >>> import paceline
        >>> _ = paceline.init()
        >>> paceline.barrier()
    """
    current().barrier()


@checked_late
def preempted() -> bool:
    """Return whether this process has been preempted: by SIGTERM, SIGUSR1 or SIGUSR2, as schedulers reclaim a machine.

    A script that never calls this leaves the job at the end of the step, with exit code 143. A script that has called
    it decides for itself: it saves what it needs, and exits soon. Always False where the script has its own handlers
    for these signals. Does not block.

    Example:
        >>> import paceline
        >>> _ = paceline.init()
        >>> paceline.preempted()
        False
    """
    return current().notice.check_preempted()


@checked_late
def report(*, loss: float | None = None, accuracy: float | None = None, **values: float) -> None:
    """Report the training loss of this clock, or with `accuracy` (0 to 1) an evaluation on held-out data.

    Other values may have any names. The live progress and the report show losses, `paceline tune` compares trials by
    loss and accuracy, and trackers (`paceline run --log tensorboard`) get all of them: those of each worker, and merged
    into the mean of what all workers have reported in a clock. The first of each name that is NaN or infinite is told
    on stderr. Does not block. A worker that has been preempted, as a pruned trial is, exits here: with an evaluation,
    or before its first clock is finished; otherwise it exits at the end of the step.

    Raises:
        SystemExit: with 143; see `preempted`.
        UsageError: an accuracy without a loss, a value that is not a number, or a name of more than 100 characters.

    Example:
        >>> import paceline
        >>> _ = paceline.init()
        >>> paceline.report(loss=0.7, grad_norm=1.3)
        >>> paceline.report(loss=0.8, accuracy=0.91)
    """
    session = current()
    clock = session.node.clock
    here = f"report, worker {session.rank}, clock {clock}"
    loss = None if loss is None else as_number(loss, here, "loss")
    accuracy = None if accuracy is None else as_number(accuracy, here, "accuracy")
    if values:
        session.metrics.note_values(
            clock, {name: as_number(values[name], here, _checked_name(name)) for name in values}
        )
    if accuracy is None:
        if loss is not None or not values:
            session.metrics.note_loss(clock, loss)
    elif loss is None:
        raise UsageError("report(accuracy=...) also needs loss=..., measured on the same data.")
    else:
        session.metrics.note_evaluation(clock, loss, accuracy)
    if accuracy is not None or clock == 0:
        session.exit_if_preempted()


def _checked_name(name: str) -> str:
    if len(name) > _LONGEST_NAME or not name.isprintable():
        raise UsageError(f"report: {brief(name)} is not a name: expected at most {_LONGEST_NAME} printable characters.")
    return name


@overload
def shard(
    source: DataLoader[_Sample],
    *,
    seed: int = 0,
    slices: int = 1,
    partition: Partition | None = None,
    shuffle: bool = False,
    key: Callable[[Any], Key] | None = None,
) -> PositionedLoader[_Sample]: ...


@overload
def shard(
    source: _Source,
    *,
    seed: int = 0,
    slices: int = 1,
    partition: Partition | None = None,
    shuffle: bool = False,
    key: Callable[[Any], Key] | None = None,
) -> _Source: ...


@checked
def shard(
    source: _Source,
    *,
    seed: int = 0,
    slices: int = 1,
    partition: Partition | None = None,
    shuffle: bool = False,
    key: Callable[[Any], Key] | None = None,
) -> _Source | PositionedLoader[Any]:
    """Return this worker's shard of a data source: a `DataLoader`, a dataset, a sequence, a tensor, files, an iterable.

    All workers together see every sample once per epoch. A loader is split by batches and shuffled by `seed` and epoch,
    identically on every worker. When its batches do not divide evenly, workers without a last batch finish that clock
    without one, so that all stay in step (this assumes one step per batch: with gradient accumulation, make them divide
    evenly). Batches that are read with gradients off, as in `optimizer.snapshot()`, are for evaluation: they count no
    samples and finish no clock. A loader has `state_dict()` and `load_state_dict(...)`, which record the progress of
    all workers and let any number of workers continue from there.

    With `slices`, fast workers help slow ones: a worker's batch for one clock, `batch_size` samples, is split into that
    many slices. A worker computes its own slices first, then those of the worker with the most left; `step()`
    accumulates their gradients, weighted by samples, and finishes the clock when no slice is left. A clock then takes
    as long as the combined speed of all workers allows, and each sample still counts once, on whichever worker it was
    computed. Requires an optimizer from `distributed` (not under all-reduce) and a `DataLoader` with num_workers=0;
    `no_grad` loops get whole batches.

    A sharded loader is a `DataLoader` that frameworks leave as it is, with `set_epoch`, too.

    Where workers come and go (`paceline run --workers 2:8`), the workers that are there share the batches of all places
    in that way, with whole batches as slices, and only a `DataLoader` can be sharded; `no_grad` loops get all batches.

    Args:
        source: the samples, the batches of a loader, or the files of `paceline.files` to shard. Not empty.
        seed: seed of the shuffle, the same on all workers.
        slices: number of slices of a worker's batch.
        partition: "strided" gives worker r of W the samples r, r + W and so on; "contiguous" gives it one run, whose
            length differs between workers by at most one; "hashed" gives it the samples whose hash maps to it, so that
            a sample keeps its worker when others are added. Default: strided; files are balanced by bytes.
        shuffle: shuffle by `seed` before the split, identically for any number of workers. A loader has its own
            setting, and is shuffled anew in every epoch.
        key: returns what is hashed of a sample (or `Path`): an int, str, bytes or tuple of these. Default: the index
            in the source, or the path.

    Raises:
        UsageError: a loader with a custom sampler, or over an iterable dataset: shard the dataset instead; a source
            that is empty or cannot be split this way: an iterable of unknown length into runs, or a loader by hash;
            slices of a source that is not a loader, more slices than samples in a batch, or a loop over slices without
            an optimizer that can accumulate their gradients.

    Example:
        >>> import paceline
        >>> _ = paceline.init()
        >>> paceline.shard(["a", "b", "c"])  # worker 0 of 1 gets everything
        ['a', 'b', 'c']
        >>> sorted(paceline.shard(["a", "b", "c"], shuffle=True, partition="contiguous"))
        ['a', 'b', 'c']
    """
    from paceline.data.partition import DataCut
    from paceline.data.sharding import shard_source
    from paceline.data.slicing import slice_source

    session, cut = current(), DataCut(partition, shuffle, key)
    sharding = session.sharding(seed)
    if slices != 1 or session.is_elastic:
        found = slice_source(source, sharding, slices, session.slicing, cut)
    else:
        found = shard_source(source, sharding, cut)
    session.sources.note(found)
    return found


@checked
def snapshot(folder: str | Path, *, keep: int = 3, state: object = None) -> Future[Path] | None:
    """Begin a snapshot of all tables, as they are at this worker's clock, and go on; worker 0 writes it.

    Every worker may call it, at the same clock; on the others it does nothing and returns None. Blocks for one round
    trip to the servers. The result is a future of the folder of the snapshot, in `folder`: it ends once all of it is on
    disk, and has the error if that fails; then the snapshot before counts. `paceline run --resume` goes on from it, and
    `paceline snapshot` looks into it.

    Args:
        folder: of the snapshots of this job, and of no other.
        keep: how many of the newest stay.
        state: what else a job that resumes needs: numbers, texts, lists and dicts, such as the `state_dict()` of a
            scheduler. `paceline.resumed().state` returns it.

    Raises:
        UsageError: an argument is not valid.

    Example:
        >>> import tempfile, paceline
        >>> _ = paceline.init()
        >>> written = paceline.snapshot(tempfile.mkdtemp(), state={"note": "before the change"})
        >>> written.result(60).name
        'snapshot-1'
    """
    if not isinstance(folder, str | Path):  # pyright: ignore[reportUnnecessaryIsInstance] - scripts are not typed
        raise UsageError(f"snapshot: the folder is {brief(folder)}, expected a path.")
    if not isinstance(keep, int) or keep < 1:  # pyright: ignore[reportUnnecessaryIsInstance] - scripts are not typed
        raise UsageError(f"snapshot: keep is {brief(keep)}, expected 1 or more.")
    session = current()
    if session.rank:
        return None
    return session.snapshots.take(Path(folder).absolute(), keep, session.sources.positions(), state)


@checked_late
def resumed() -> ResumedFrom | None:
    """Return the snapshot that this job goes on from, with its clock and state; None for a job that begins anew.

    Example:
        >>> import paceline
        >>> _ = paceline.init()
        >>> paceline.resumed() is None
        True
    """
    saved = current().saved
    return None if saved is None else saved.resumed


@checked
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
    """Split a model over several workers: its layers into pipeline stages, each layer over tensor ranks.

    Every worker calls this with the same model and keeps its own part; the memory of the other parts is freed. Without
    a split, asked for here or by the launcher, the result holds the whole model and has the same interface. Blocks
    until all workers have called it.

    Args:
        model: a `torch.nn.Sequential` (those inside of it are flattened), or a model with a method `layers()` that
            returns the modules whose composition is its forward; any model where nothing is cut.
        loss: of outputs and targets, one number for the batch: `torch.nn.functional.cross_entropy` for example.
        pipeline: number of pipeline stages. Default: the launcher's, else 1.
        tensor: number of ranks that each layer is split over. Default: the launcher's, else 1.
        data: how replicas of the model are kept together, "ssp:3" or "all-reduce" for example. There are as many
            replicas as workers divided by pipeline times tensor. Default: the launcher's, else the parameter server.
        micro_batches: number of micro-batches of a batch, which must divide it. Default: four per stage, or the next
            lower number that divides the batch.
        schedule: "1f1b" runs each backward as soon as it can, and keeps the activations of at most as many
            micro-batches as there are stages; "gpipe" runs all forwards first.
        recompute: keep only the input of each layer, and run it again for backward, with the same random numbers.
        balance: inputs that worker 0 measures each layer with, so that stages take the same time; without it stages
            have about the same number of parameters.
        placement: explicit stages instead: by prefix of layer names, {"features": 0, "classifier": 1}, or a list of
            the first layer of each stage after the first.
        reduction: how the losses of micro-batches combine into the loss of the batch: "mean", "sum", or a function
            that returns the weight of a micro-batch from its targets, `lambda targets: (targets >= 0).sum()` for
            example. Default: derived from torch losses (`reduction`, `ignore_index`, `weight`). Any other loss is
            computed once per batch, which keeps the activations of all micro-batches as "gpipe" does.

    Raises:
        UsageError: the model cannot be split this way, the workers do not divide evenly, or workers are threads where
            processes are required.
        PeerError: a worker is gone.

    Example:
        >>> import torch, paceline
        >>> _ = paceline.init()
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 1))
        >>> model = paceline.parallelize(model, loss=torch.nn.functional.mse_loss)
        >>> isinstance(model.forward_backward(torch.ones(4, 2), torch.ones(4, 1)), float)
        True
    """
    from paceline.model_parallel.parallelize import ParallelizeOptions, keep_part

    session = current()
    asked = ParallelizeOptions(
        pipeline, tensor, data, micro_batches, schedule, recompute, balance, placement, reduction
    )
    return keep_part(model, loss, asked, session.exchange, session.arrangement)


@checked
def distributed(
    optimizer: torch.optim.Optimizer,
    *,
    strategy: StrategyLike | Mapping[str, StrategyLike] | None = None,
    consistency: Consistency | str | None = None,
    scale: Scale | None = None,
    divide_lr: bool | None = None,
    fetch_every: int | None = 1,
    nonfinite: NonFinite = "reject",
    views: bool | None = None,
    overlap: bool = False,
    factors: bool = False,
    model: nn.Module | None = None,
    name: str | None = None,
) -> Distributed:
    """Distribute an optimizer over the job: the one changed line of an ordinary training loop.

    The result is used like the optimizer it wraps: `zero_grad`, `step`, `param_groups`, schedulers, `state_dict`. Its
    parameters are set to those of worker 0 at once. `step()` pushes this worker's gradients, finishes its clock and
    pulls values; it blocks as long as the consistency requires. Gradients clipped before `step` are clipped per worker,
    but for `optimizer.clip_gradients(max_norm)`, which clips their mean.

    Args:
        optimizer: any `torch.optim` optimizer that steps without a closure; the servers run its class with its
            hyperparameters.
        strategy: how workers share the update. Default: the launcher's --strategy, "ssp:3" for example, else
            "parameter-server". A name, or one of `paceline.strategies`; `all_reduce` requires `model` and supports
            `scale`, `nonfinite` and `name`. A mapping gives a strategy per pattern of parameter names,
            {"embedding.*": "ssp:3", "*": "all-reduce"}; the first match counts.
        consistency: when reads wait. Default: the launcher's --consistency, else bsp().
        scale: how one update combines the workers' gradients: the mean weighted by "samples" (default; the counts
            come from `shard`, or from `step(samples=...)`), the plain "mean", or the "sum". Under ssp and asynchronous
            each push is an update of its own and is applied in full with the given learning rate.
        divide_lr: under ssp, essp, asynchronous and downpour, apply each push with the learning rate divided by the
            number of workers (with slices: times its share of the clock's samples), so that all pushes of a clock step
            as far as their mean does under bsp and all-reduce, where this changes nothing. Default: the launcher's
            --divide-lr, else False.
        fetch_every: pull values every n-th step; in between, and always with None, use the cached values until the
            staleness bound forces a pull.
        nonfinite: a gradient with NaN or infinity is dropped and counted ("reject"), zeroed there ("zero"), or ends
            the worker ("halt"); "ignore" applies it unchecked.
        views: make the parameters views of the servers' memory where that is on this machine (shm), so that reading
            them copies nothing. Default: under bsp, where values change only while all workers wait. Under other
            policies updates of other workers show in the middle of a step: values are never too old, but not of one
            moment. What a script writes to such a parameter is lost with the next step, as without views. Other tensors
            of its memory, as `weight.detach()` from before, do not follow it, but for buffers of `model`.
        overlap: push gradients while backward still runs, in buckets of some MB, and with `model` wait for values when
            its forward begins (in a `Sequential`, child by child) instead of in `step`; until then all parameters are
            those of the step before. If some are views, or not of the model, `step` waits. For links that are slow
            compared with the computation. A backward that is not the last of its step then belongs inside
            `with optimizer.accumulate()`, gradients must not change after backward, and each bucket is a push of its
            own: one that is not finite does not stop the updates of the others.
        factors: send, in the place of the gradient of a `torch.nn.Linear` of `model`, the inputs and the gradients at
            the outputs that it is the product of, wherever these have fewer bytes: for large layers and small batches
            over a line on which what is sent costs more than what is received. The server multiplies them; values may
            differ in their last bits. For float32 and float64 on CPUs. Where memory is shared, nothing changes.
        model: if given, its floating-point buffers (BatchNorm statistics) are averaged over the workers too, and
            messages use its parameter names.
        name: name of the table on the servers; unique in the job. Default: "model", then "model-2" and so on, the same
            on all workers that make these calls in the same order. A notebook can therefore run a cell again, and
            continues from the values that the model has.

    Raises:
        Refused: another worker has a different model or optimizer; the first differences are listed.
        UsageError: the optimizer cannot run on a server; the message gives the reason.

    Example:
        >>> import torch, paceline
        >>> _ = paceline.init()
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = paceline.distributed(torch.optim.SGD(model.parameters(), lr=0.1), name="doc")
        >>> model(torch.ones(2)).sum().backward()
        >>> optimizer.step()
    """
    from paceline.training.arguments import check_distributed, choose_strategy, divided_by_dtype, takes_consistency
    from paceline.training.parameter_server import ParameterServer
    from paceline.training.strategy import Settings

    session = current()
    check_distributed(optimizer, model, strategy, consistency, fetch_every, name)
    served = (consistency or session.consistency) is not None
    chosen = choose_strategy(strategy, session.arrangement.between_replicas(served=served))
    name = session.tables.default_name("model") if name is None else name
    if consistency is not None and not takes_consistency(chosen):
        raise UsageError(f"'{name}' was given both {chosen} and consistency={consistency!r}, which is for servers.")
    if factors and not isinstance(chosen, ParameterServer):
        raise UsageError(f"'{name}' was given both {chosen} and factors=True, which is for servers: leave it out.")
    if not session.arrangement.grid.is_split:
        chosen = divided_by_dtype(chosen, optimizer)
    policy = session.policy(consistency)
    divide_lr = session.divide_lr if divide_lr is None else divide_lr
    settings = Settings(
        policy, session.scale_of(scale), fetch_every, nonfinite, name, views, overlap, factors, divide_lr
    )
    return session.distributed(optimizer, model=model, settings=settings, strategy=chosen)
