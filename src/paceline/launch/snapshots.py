"""Which snapshots a job writes and resumes from: by options, or by variables under other launchers."""

import secrets
from pathlib import Path
from tempfile import TemporaryFile
from typing import Final

from msgspec.structs import replace

from paceline.errors import CheckpointError, UsageError
from paceline.job.environment import asked_snapshots
from paceline.job.spec import ClusterSpec
from paceline.snapshots.folder import MANIFEST, Snapshot, newest, snapshots_in
from paceline.snapshots.options import SnapshotOptions

_MOST_GENERATIONS: Final = 1 << 32  # between a job and one that goes on from it


def with_snapshots(spec: ClusterSpec, asked: SnapshotOptions) -> ClusterSpec:
    """Return the spec of a job that keeps snapshots, or goes on from one, whose files are read once to check them.

    Its generation is above that of the job that wrote the snapshot, by a number that is drawn: of two jobs that go on
    from one snapshot, as when the first is lost before it has written another, neither takes pushes of the other.

    Raises:
        UsageError: there is no snapshot to go on from, or none can be written.
        CheckpointError: the one that is there is damaged.
    """
    if asked.snapshots is not None:
        folder = str(_writable(asked.snapshots.absolute()))
        spec = replace(spec, snapshots=folder, snapshot_every_s=asked.every_s, snapshots_kept=asked.num_kept)
    if asked.resume is None:
        return spec
    found = _whole(asked.resume.absolute())
    manifest = found.manifest
    generation = manifest.generation + 1 + secrets.randbelow(_MOST_GENERATIONS)
    return replace(spec, resume=str(found.folder), clock=manifest.clock, generation=generation)


def _writable(folder: Path) -> Path:
    """Return a folder in which files can be made; else a job would learn of it with its first snapshot."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise UsageError(
            f"--snapshots: no files can be made in {folder}: {error.strerror}; name a folder that can be written"
        ) from error


def _whole(folder: Path) -> Snapshot:
    """Return the snapshot to go on from, whose files have their digests."""
    try:
        found = newest(folder)
        found.verify()
    except CheckpointError as error:
        older = [] if (folder / MANIFEST).exists() else snapshots_in(folder)[:-1]
        if not older:
            raise
        raise CheckpointError(f"{error}; to go on from the one before, name it: --resume {older[-1]}") from error
    return found


def resumption(spec: ClusterSpec) -> str:
    """Return what is told of where the job goes on from, empty for one that begins anew."""
    return f"goes on from {spec.resume}, at clock {spec.clock}" if spec.resume else ""


def options_of_environment() -> SnapshotOptions:
    """Return what the environment asks about snapshots, where another launcher has no options of ours.

    Where a job keeps its snapshots and goes on from those of one folder, it begins anew if there are none yet: a
    launcher that starts a job again starts it as it did before. Raises UsageError for what makes no sense.
    """
    folder, every, resume = asked_snapshots()
    if resume is not None and resume == folder and not _has_any(resume):
        resume = None
    asked = SnapshotOptions(snapshots=folder, snapshot_every=every, resume=resume)
    asked.validate()
    return asked


def _has_any(folder: Path) -> bool:
    return folder.exists() and bool(snapshots_in(folder))
