"""The public `publish`."""

from __future__ import annotations

from torch import nn

from paceline.api.script import current
from paceline.core.calls import checked_late
from paceline.errors import UsageError
from paceline.training.publishing import KEPT, PUBLISHED_AS
from paceline.worker.parts import PartedTable
from paceline.worker.publishing import Publication
from paceline.worker.table import Table
from paceline.worker.validation import brief


@checked_late
def publish(
    what: nn.Module | Table | PartedTable, *, name: str = PUBLISHED_AS, keep: int = KEPT, rank: int = 0
) -> Publication | None:
    """Publish a version of a model, or of a table, which never changes: `paceline.subscribe` reads it, in any process.

    The version has every update of the clocks that this worker has finished, and under policies whose updates show
    clock by clock nothing else; its number is the number of these clocks. Servers copy their part as soon as they have
    it, while this worker goes on: the call does not block, unless four versions are under way. All workers may call it,
    as they all run the script: one of them publishes.

    Args:
        what: a model whose optimizer `paceline.distributed` made (parameters, and buffers that are saved with it), or
            a table of a shape.
        name: under which readers find it.
        keep: how many versions to keep; older ones stay only as long as a reader holds a lease.
        rank: the worker that publishes; calls of others return None.

    Returns:
        The version, whose `wait()` blocks until all servers have cut it, which they copy then.

    Raises:
        UsageError: no server holds the values, or an argument is not valid.
        DeadlineExceeded, PeerError: see `Publication.wait`; only if four versions are under way.

    Example:
        >>> import paceline
        >>> ps = paceline.init()
        >>> w = ps.table("published", shape=(2,), update=paceline.update.Add())
        >>> _ = w.push([1.0, 2.0])
        >>> _ = ps.clock()
        >>> paceline.publish(w, name="weights").wait()
        >>> with paceline.subscribe(ps, name="weights") as reader:
        ...     reader.latest()["published"]
        tensor([1., 2.])
    """
    session = current()
    if rank not in range(session.size):
        raise UsageError(f"publish: rank is {brief(rank)}, expected that of a worker, 0 to {session.size - 1}.")
    if session.rank != rank:
        return None
    return session.models.publish(what, name, keep)
