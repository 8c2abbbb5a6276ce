"""The public `feed`: a loader of batches from data servers, or from this process where the job has none."""

from __future__ import annotations

from paceline.api.script import current
from paceline.core.calls import checked_late
from paceline.data.source_loader import FedLoader, FeedPlan
from paceline.data.sources.declared import BatchRecipe, OnError, Source
from paceline.errors import UsageError

_WHAT_NOW = {"raise": "the batch fails", "skip": "the record is left out"}


@checked_late
def feed(
    source: Source,
    *,
    batch_size: int,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = False,
    transform: str | None = None,
    on_error: OnError = "raise",
    leases: bool = True,
    slices: int = 1,
    prefetch: int = 2,
) -> FedLoader:
    r"""Return a loader of batches from data servers, or from this process where the job has none, bit for bit the same.

    All workers call this with the same arguments, and together see every sample once per epoch, in an order that
    depends on `seed` and epoch alone. With `leases` batches are assigned dynamically: a worker computes its own first,
    and then those of a slow or dead worker; `step()` of an optimizer from `distributed` finishes the clock. Blocks
    until the source is open.

    Args:
        source: one of `paceline.sources`.
        batch_size: number of samples in a batch, which is one worker's work for one clock.
        shuffle: shuffle the samples, anew in every epoch.
        seed: seed of the shuffle, and of the generators of transforms.
        drop_last: drop a last batch that is smaller.
        transform: "module:function", which maps a record to a record; imported where batches are made. If it
            has a parameter named `generator`, that is a `torch.Generator` that depends on seed, epoch and sample alone.
        on_error: a record that cannot be decoded fails the batch ("raise"), or is skipped and counted ("skip").
        leases: without them every worker has a fixed shard, as from `shard`: for all-reduce and FSDP, and for loops
            whose clocks no optimizer finishes.
        slices: number of slices of a batch, assigned one by one, so that a slow worker is helped within a clock.
        prefetch: number of batches that data servers make before this worker reads them.

    Raises:
        UsageError: arguments that are not valid, or code that cannot be imported.
        DataError: a file that is missing or damaged.
        PeerError: no data server can be reached in time.

    Example:
        >>> import tempfile, torch, paceline
        >>> from pathlib import Path
        >>> path = Path(tempfile.mkdtemp()) / "poem.txt"
        >>> _ = path.write_text("so much depends\nupon\na red wheel\nbarrow\n")
        >>> _ = paceline.init()
        >>> loader = paceline.feed(paceline.sources.lines(path), batch_size=3, leases=False)
        >>> list(loader), len(loader), loader.num_samples
        ([['so much depends', 'upon', 'a red wheel'], ['barrow']], 2, 4)
    """
    if not isinstance(source, Source):  # pyright: ignore[reportUnnecessaryIsInstance] - it comes from callers
        raise UsageError(
            f"cannot feed from a {type(source).__name__}: expected what a function of paceline.sources returns, "
            "paceline.sources.arrays('digits.npz', 'images', 'labels') for example; paceline.shard takes loaders."
        )
    if transform is not None and not isinstance(transform, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(f"transform is {transform!r}: name a function by its import path, as in 'augment:shifted'.")
    if not isinstance(on_error, str) or on_error not in _WHAT_NOW:  # pyright: ignore[reportUnnecessaryIsInstance]
        known = ", ".join(f'"{name}" ({what})' for name, what in _WHAT_NOW.items())
        raise UsageError(f"on_error is {on_error!r}, expected {known}.")
    plan = FeedPlan(
        batch_size=batch_size,
        shuffle=shuffle,
        drop_last=drop_last,
        leases=leases,
        slices=slices,
        prefetch=prefetch,
        skips=on_error == "skip",
    )
    session = current()
    sharding = session.sharding(seed)
    reader = session.readers.open(BatchRecipe(source, transform, on_error, seed), prefetch)
    loader = FedLoader(reader, plan, sharding, session.slicing, session.metrics.trace)
    session.sources.note(loader)
    return loader
