"""A process group of torch over Paceline's own collectives: what torch.distributed and its modules call."""

# Torch calls these methods by position; its own signatures are several for each name.
# pyright: reportIncompatibleMethodOverride=false, reportAssignmentType=false

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from queue import SimpleQueue
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from paceline.collective.exchange import COMBINE, REDUCTIONS, Combine, Exchange
from paceline.collective.peers import MOST_TAG, Peers
from paceline.collective.rounds import Call
from paceline.collective.torch_backend import NAME
from paceline.errors import PeerError, UsageError
from paceline.torch_private import AllgatherOptions
from paceline.transport.deadline import Deadline
from paceline.update.dtypes import dtype_name

Options = Any  # torch has a class of them for each call

_MAX_TAG: Final = 1 << 40
_SPLIT_TAG: Final = MOST_TAG  # of all_to_all, beyond the tags of a script


@final
class OwnGroup(ProcessGroup):
    """A process group whose calls are made in order: at once in the caller's thread, or by a thread of the group.

    Tensors on other devices go through the memory of the host. A failed call ends the group for this worker.

    Args:
        peers: the other workers.
        exchange: makes the collectives among all of them.
        timeout_s: the deadline of calls that name none.
        at_once: make all calls in the caller's thread.
    """

    def __init__(self, peers: Peers, exchange: Exchange, timeout_s: float, *, at_once: bool = False) -> None:
        super().__init__(peers.rank, peers.size)  # pyright: ignore[reportCallIssue] - torch has two of them
        self.peers: Final = peers
        self._exchange = exchange
        self._timeout_s = timeout_s
        self._at_once = at_once
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ending: threading.Thread | None = None  # the one before, which ends after the calls that are queued
        self._calling = threading.RLock()
        self._counting = threading.Lock()
        self._num_queued = 0
        self._texts = {"name": "", "description": ""}
        weakref.finalize(self, _end, self.peers, self._queue).atexit = False

    # -- what torch calls --------------------------------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the name that scripts give to init_process_group."""
        return NAME

    # Torch keeps these in backends of its own, of which there is none here.

    @property
    def group_name(self) -> str:
        """Return the name under which torch knows the group."""
        return self._texts["name"]

    @property
    def group_desc(self) -> str:
        """Return what torch calls the group in its messages."""
        return self._texts["description"]

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        """Return the name under which torch knows the group."""
        return self.group_name

    def getGroupDesc(self) -> str:  # noqa: N802 - torch's name
        """Return what torch calls the group in its messages."""
        return self.group_desc

    def _set_group_name(self, name: str) -> None:
        self._texts["name"] = name

    def _set_group_desc(self, description: str) -> None:
        self._texts["description"] = description

    def allreduce(self, tensors: list[Tensor], opts: Options) -> Work:
        """Replace a tensor by the reduction of those of all workers."""
        return self.allreduce_coalesced(tensors, opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Options) -> Work:
        """Replace each of some tensors by the reduction of those of all workers."""
        how, combine = _reduction(opts.reduceOp, tensors)

        def act(flats: Sequence[Tensor], deadline: Deadline) -> None:
            for flat in flats:
                self._exchange.all_reduce(_call_over("all_reduce", flat, how), flat, combine, deadline)

        return self._call(tensors, opts, act)

    def broadcast(self, tensors: list[Tensor], opts: Options) -> Work:
        """Replace the tensors of all workers by the root's."""
        root: int = opts.rootRank
        return self._call(
            tensors,
            opts,
            lambda flats, deadline: self._exchange.broadcast(
                _call_over("broadcast", flats[0], root), flats[0], root, deadline
            ),
        )

    def reduce(self, tensors: list[Tensor], opts: Options) -> Work:
        """Replace the root's tensor by the reduction of those of all workers."""
        how, combine = _reduction(opts.reduceOp, tensors)
        root: int = opts.rootRank
        return self._call(
            tensors,
            opts,
            lambda flats, deadline: self._exchange.reduce(
                _call_over("reduce", flats[0], how + len(REDUCTIONS) * root),
                flats[0],
                combine,
                root,
                deadline,
            ),
        )

    def allgather(
        self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Options | None = None
    ) -> Work:
        """Give every worker the tensors of all. Older versions of torch leave the options out."""
        return self._all_gather(output_tensors[0], input_tensors[0], opts or AllgatherOptions())

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Options) -> Work:
        """Give every worker the tensors of all, one after the other in one tensor."""
        return self._all_gather(_split(output, self.peers.size), given, opts)

    def allgather_coalesced(self, output_lists: list[list[Tensor]], inputs: list[Tensor], opts: Options) -> Work:
        """Give every worker some tensors of all; `output_lists` is by tensor, then by rank."""
        work = _Done(inputs)
        for found, given in zip(output_lists, inputs, strict=True):
            work = self._all_gather(found, given, opts)
        return work

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Options) -> Work:
        """Make several calls of `all_gather_single`."""
        work = _Done(inputs)
        for found, given in zip(outputs, inputs, strict=True):
            work = self.all_gather_single(found, given, opts)
        return work

    def reduce_scatter(self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: Options) -> Work:
        """Give each worker the reduction of what all workers have for it."""
        return self._reduce_scatter(output_tensors[0], input_tensors[0], opts)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Options) -> Work:
        """Give each worker its part of the reduction of the tensors of all."""
        return self._reduce_scatter(output, _split(given, self.peers.size), opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Options) -> Work:
        """Make several calls of `reduce_scatter_single`."""
        work = _Done(outputs)
        for found, given in zip(outputs, inputs, strict=True):
            work = self.reduce_scatter_single(found, given, opts)
        return work

    def gather(self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Options) -> Work:
        """Give the root the tensors of all workers."""
        root: int = opts.rootRank
        found = output_tensors[0] if output_tensors else []
        num_found = len(found)
        _require_alike([*found, input_tensors[0]])

        def act(flats: Sequence[Tensor], deadline: Deadline) -> None:
            call = _call_over("gather", flats[-1], root)
            self._exchange.gather(call, flats[-1], flats[:num_found], root, deadline)

        return self._call([*found, input_tensors[0]], opts, act, num_results=num_found)

    def scatter(self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: Options) -> Work:
        """Give each worker what the root has for it."""
        root: int = opts.rootRank
        given = input_tensors[0] if input_tensors else []
        _require_alike([output_tensors[0], *given])

        def act(flats: Sequence[Tensor], deadline: Deadline) -> None:
            call = _call_over("scatter", flats[0], root)
            self._exchange.scatter(call, flats[1:], flats[0], root, deadline)

        return self._call([output_tensors[0], *given], opts, act, num_results=1)

    def all_to_all_single(
        self, output: Tensor, given: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Options
    ) -> Work:
        """Give each worker its part of the tensors of all: equal ones, or so many of the first dimension."""
        num_workers = self.peers.size
        found, parts = _split(output, num_workers, output_sizes), _split(given, num_workers, input_sizes)
        if output_sizes or input_sizes:
            return self.alltoall(found, parts, opts)
        return self._call(
            [*found, *parts],
            opts,
            lambda flats, deadline: self._exchange.all_to_all(
                _call_over("all_to_all", flats[0]),
                flats[num_workers:],
                flats[:num_workers],
                deadline,
            ),
            num_results=num_workers,
        )

    def alltoall(self, output_tensors: list[Tensor], input_tensors: list[Tensor], opts: Options) -> Work:
        """Give each worker what all workers have for it, in tensors that may differ in size."""
        num_workers, own = self.peers.size, self.peers.rank

        def act(flats: Sequence[Tensor], deadline: Deadline) -> None:
            found, given = flats[:num_workers], flats[num_workers:]
            for other in self.peers.others:
                self._send(given[other], other, _SPLIT_TAG)
            problems: list[UsageError] = []
            if len(found[own]) == len(given[own]):
                found[own].copy_(given[own])
            else:
                problems.append(
                    UsageError(f"worker {own} gives itself {len(given[own])} values for {len(found[own])}.")
                )
            for other in self.peers.others:
                try:
                    self._receive(found[other], [other], _SPLIT_TAG, deadline)
                except UsageError as error:  # first all is taken: what was left would be taken by the next call
                    problems.append(error)
            if problems:
                raise problems[0]

        return self._call([*output_tensors, *input_tensors], opts, act, num_results=num_workers)

    def barrier(self, opts: Options) -> Work:
        """Wait until all workers have called this."""

        def act(_: Sequence[Tensor], deadline: Deadline) -> None:
            self._exchange.barrier(Call("barrier"), deadline)

        return self._call([], opts, act)

    def send(self, tensors: list[Tensor], dst_rank: int, tag: int = 0) -> Work:
        """Send a tensor to one worker, which keeps it until it asks for it; blocks until it has left."""
        self._send(_flat(tensors[0]), dst_rank, _checked(tag))
        return _Done(tensors)

    def recv(self, tensors: list[Tensor], src_rank: int, tag: int = 0) -> Work:
        """Return the work of receiving a tensor from one worker, which its `wait` does."""
        return _Receive(self, tensors, [src_rank], _checked(tag))

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work:
        """Return the work of receiving a tensor from whichever worker sends one first."""
        return _Receive(self, tensors, self.peers.others, _checked(tag))

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the deadline of the calls that name none."""
        self._timeout_s = timeout.total_seconds()

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: rounds are counted."""

    def abort(self) -> None:
        """End all connections: waits of this worker and those of the others for it fail at once."""
        self.peers.end("its process group has been ended")
        self._end_thread()
        if self._calling.acquire(blocking=False):  # else a thread is in a call, which uses the memory of the group
            try:
                self._exchange.close()
            finally:
                self._calling.release()

    def shutdown(self) -> None:
        """End the group, after all calls that are queued."""
        self._end_thread()
        if self._ending is not None and self._ending is not threading.current_thread():
            self._ending.join(self._timeout_s)
        self.abort()
        with self._calling:
            self._exchange.close()

    def _end_thread(self) -> None:
        """Let the thread of calls end after those that are queued."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread, self._ending = None, self._thread

    # What older versions of torch call them.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # -- for Paceline's own calls ------------------------------------------------------------------------------------

    def agree(self, words: Tensor) -> list[Tensor]:
        """Return the words of all workers, by rank; blocks until all have called this."""
        found = [torch.empty_like(words) for _ in range(self.peers.size)]
        with self._calling, self._ending_on_failure():
            call = _call_over("agree", words)
            self._exchange.all_gather(call, words, found, Deadline.after(self._timeout_s))
        return found

    def receive(self, tensors: list[Tensor], sources: Sequence[int], tag: int, timeout_s: float | None) -> int:
        """Receive a tensor; blocks, and returns from which worker."""
        flat = _flat(tensors[0])
        source = self._receive(flat, sources, tag, Deadline.after(timeout_s or self._timeout_s))
        _copy_back(tensors[0], flat)
        return source

    # -- how ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def _ending_on_failure(self) -> Generator[None]:
        """End the group if a call inside is left in the middle: its rounds would be taken for those of the next one.

        A call that is refused, as others make another one, was left by all workers at the same place.
        """
        try:
            yield
        except UsageError:
            raise
        except PeerError as error:
            self.peers.end(f"an earlier call has failed: {error}", error)
            raise
        except BaseException as error:  # torch's, or what the handler of a signal raises
            told = f"worker {self.peers.rank}: a call was interrupted by {type(error).__name__}"
            self.peers.end(f"an earlier call was interrupted by {type(error).__name__}", PeerError(told))
            raise

    def _all_gather(self, found: list[Tensor], given: Tensor, opts: Options) -> Work:
        num_found = len(found)
        _require_alike([*found, given])
        return self._call(
            [*found, given],
            opts,
            lambda flats, deadline: self._exchange.all_gather(
                _call_over("all_gather", flats[-1]), flats[-1], flats[:num_found], deadline
            ),
            num_results=num_found,
        )

    def _reduce_scatter(self, found: Tensor, given: list[Tensor], opts: Options) -> Work:
        how, combine = _reduction(opts.reduceOp, given)
        _require_alike([found, *given])
        return self._call(
            [found, *given],
            opts,
            lambda flats, deadline: self._exchange.reduce_scatter(
                _call_over("reduce_scatter", flats[0], how), flats[1:], flats[0], combine, deadline
            ),
            num_results=1,
        )

    def _send(self, flat: Tensor, to: int, tag: int) -> None:
        if to == self.peers.rank:
            raise UsageError(f"worker {to} cannot send to itself.")
        self.peers.send(to, tag, body=flat.view(torch.uint8).numpy().data, timeout_s=self._timeout_s)

    def _receive(self, flat: Tensor, sources: Sequence[int], tag: int, deadline: Deadline) -> int:
        source, (_, body) = self.peers.take(sources, tag, "receive", deadline)
        if len(body) != flat.nbytes:
            raise UsageError(
                f"worker {self.peers.rank}: expected {flat.nbytes} bytes from worker {source}, got {len(body)}: both "
                "ends must have tensors of one shape and dtype."
            )
        if len(body):
            flat.view(torch.uint8).copy_(torch.frombuffer(body, dtype=torch.uint8))
        return source

    def _call(
        self,
        tensors: list[Tensor],
        opts: Options,
        act: Callable[[Sequence[Tensor], Deadline], None],
        num_results: int | None = None,
    ) -> Work:
        """Make a call over tensors, of which the first `num_results` change.

        Calls are made in order: by the group's thread, if the caller does not wait, or earlier calls are not over.
        """
        results = tensors if num_results is None else tensors[:num_results]
        for tensor in tensors:
            if tensor.layout != torch.strided:
                raise UsageError(f"the backend {NAME!r} has no calls over sparse tensors: use .to_dense() first.")
        deadline = Deadline.after(_timeout_s(opts.timeout, self._timeout_s))

        def make() -> None:
            with self._calling, torch.no_grad():
                flats = [_flat(tensor) for tensor in tensors]
                with self._ending_on_failure():
                    act(flats, deadline)
                for tensor, flat in zip(results, flats, strict=False):
                    _copy_back(tensor, flat)

        if self._at_once or (not getattr(opts, "asyncOp", True) and not self._num_queued):
            make()
            return _Done(results)
        return self._queued(make, results)

    def _queued(self, make: Callable[[], None], results: list[Tensor]) -> Work:
        self.peers.require_open()
        if self._thread is None:
            self._thread = threading.Thread(target=_run, args=(self._queue,), name="paceline-group", daemon=True)
            self._thread.start()
        work = _Queued(results)
        with self._counting:
            self._num_queued += 1

        def run() -> None:
            failure: BaseException | None = None
            try:
                make()
            except BaseException as error:  # noqa: BLE001 - told by the work that the caller waits for
                failure = error
            with self._counting:
                self._num_queued -= 1
            if failure is None:
                work.future.set_result(None)
            else:
                work.future.set_exception(failure)

        self._queue.put(run)
        return work


def _run(queue: SimpleQueue[Callable[[], None] | None]) -> None:
    """Make the calls of a group, which this does not hold itself."""
    while (run := queue.get()) is not None:
        run()
        del run  # it holds the group, and the tensors of its call


def _end(peers: Peers, queue: SimpleQueue[Callable[[], None] | None]) -> None:
    """End a group that torch has dropped: destroy_process_group does not tell it."""
    queue.put(None)
    peers.end("its process group was destroyed")


class _Done(Work):
    """A call that is over."""

    def __init__(self, results: list[Tensor]) -> None:
        super().__init__()
        self._results = results

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def is_success(self) -> bool:
        """Return True."""
        return True

    def result(self) -> list[Tensor]:
        """Return the tensors that have changed."""
        return self._results

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Return a future with the tensors that have changed."""
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self._results)
        return future


class _Queued(Work):
    """A call that the group's thread makes."""

    def __init__(self, results: list[Tensor]) -> None:
        super().__init__()
        self.future: Future[None] = Future()
        self._results = results

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until the call is over; raises what it raises."""
        self.future.result(timeout.total_seconds() if timeout.total_seconds() > 0 else None)
        return True

    def is_completed(self) -> bool:
        """Return whether the call is over."""
        return self.future.done()

    def is_success(self) -> bool:
        """Return whether the call is over and has succeeded."""
        return self.future.done() and self.future.exception() is None

    def exception(self) -> BaseException | None:
        """Return the error of a call that is over."""
        return self.future.exception() if self.future.done() else None

    def result(self) -> list[Tensor]:
        """Return the tensors that have changed."""
        return self._results

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Return a future with the tensors that have changed, or the error of the call."""
        begun: torch.futures.Future[None] = torch.futures.Future()
        self.future.add_done_callback(lambda _: begun.set_result(None))

        def read(_: object) -> list[Tensor]:
            self.future.result()
            return self._results

        return begun.then(read)


class _Receive(Work):
    """A tensor to be received, by the thread that waits for it."""

    def __init__(self, group: OwnGroup, tensors: list[Tensor], sources: Sequence[int], tag: int) -> None:
        super().__init__()
        self._group = group
        self._tensors = tensors
        self._sources = sources
        self._tag = tag
        self._source: int | None = None
        self._waiting = threading.Lock()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the tensor; raises PeerError if the other worker is gone, or does not send it in time."""
        with self._waiting, torch.no_grad():
            if self._source is None:
                limit_s = timeout.total_seconds() if timeout.total_seconds() > 0 else None
                self._source = self._group.receive(self._tensors, self._sources, self._tag, limit_s)
        return True

    def is_completed(self) -> bool:
        """Return whether `wait` would return at once."""
        peers = self._group.peers
        return self._source is not None or any(peers.has_message(source, self._tag) for source in self._sources)

    def _source_rank(self) -> int:
        """Return the worker that has sent the tensor."""
        self.wait()
        assert self._source is not None, "it has been received"
        return self._source

    def source_rank(self) -> int:
        """Return the worker that has sent the tensor."""
        return self._source_rank()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Return a future with the tensor; blocks for it."""
        self.wait()
        return _Done(self._tensors).get_future()


def _timeout_s(timeout: timedelta, usual_s: float) -> float:
    """Return the limit of a call in seconds; torch writes that there is none as a negative one."""
    return timeout.total_seconds() if timeout.total_seconds() > 0 else usual_s


def _reduction(op: Options, tensors: Sequence[Tensor]) -> tuple[int, Combine]:
    """Return the number and the function of a reduction; raises RuntimeError where torch has none for these dtypes."""
    kind = getattr(op, "op", op)
    name = str(getattr(kind, "name", kind))
    if name not in COMBINE:
        raise UsageError(f"the backend {NAME!r} does not reduce by {name}: it has {', '.join(REDUCTIONS)}.")
    for tensor in tensors:
        _try_out(name, tensor.dtype)
    return REDUCTIONS.index(name), COMBINE[name]


@cache
def _try_out(name: str, dtype: torch.dtype) -> None:
    """Reduce two values, which raises what torch says of it, before a call begins in which others take part."""
    COMBINE[name](torch.ones(1, dtype=dtype), torch.ones(1, dtype=dtype))


def _call_over(kind: str, flat: Tensor, how: int = 0) -> Call:
    return Call(kind, flat.dtype, flat.numel(), how)


def _require_alike(tensors: Sequence[Tensor]) -> None:
    """Raise UsageError unless tensors have one dtype and number of values."""
    kinds = {(tensor.dtype, tensor.numel()) for tensor in tensors}
    if len(kinds) > 1:
        told = " and ".join(sorted(f"{size} x {dtype_name(dtype)}" for dtype, size in kinds))
        raise UsageError(f"a call got tensors of {told}, expected as many values of one dtype of each worker.")


def _checked(tag: int) -> int:
    if not 0 <= tag < _MAX_TAG:
        raise UsageError(f"the tag of a message is {tag}, expected 0 to {_MAX_TAG - 1}.")
    return tag


def _flat(tensor: Tensor) -> Tensor:
    """Return a tensor's values in one dimension, in the memory of the host: its own memory if that is contiguous."""
    # One value counts as contiguous whatever its strides are, which do not let its bytes be seen.
    return tensor.detach().cpu().contiguous().as_strided((tensor.numel(),), (1,))


def _copy_back(tensor: Tensor, flat: Tensor) -> None:
    """Copy values to a tensor, unless they are in its own memory."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        tensor.copy_(flat.view(tensor.shape))


def _split(tensor: Tensor, num_workers: int, sizes: Sequence[int] = ()) -> list[Tensor]:
    """Return the parts of a tensor for each worker: equal ones of all its values, or so many of the first dimension."""
    if sizes:
        return list(tensor.split(list(sizes)))
    if tensor.numel() % num_workers:
        raise UsageError(f"a tensor of {tensor.numel()} values does not divide by {num_workers} workers.")
    return list(tensor.view(-1).tensor_split(num_workers) if tensor.is_contiguous() else tensor.chunk(num_workers))
