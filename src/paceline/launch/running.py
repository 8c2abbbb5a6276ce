"""Finds runs: live ones on this machine by their guards, others by their folders, ended ones among those kept."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from paceline.errors import UsageError
from paceline.job.addresses import CLUSTER_NAME
from paceline.job.environment import kept_runs_folder
from paceline.job.spec import ClusterSpec
from paceline.launch.guard import KEPT_NAME, PROC, RECORDS

GUARD: Final = b"paceline/launch/guard.py"


def running() -> list[Path]:
    """Return the folders of this user's runs on this machine, the one that began last first."""
    found: dict[Path, float] = {}
    for entry in PROC.iterdir() if PROC.exists() else ():
        if not entry.name.isdecimal():
            continue
        with suppress(OSError):  # gone meanwhile, or another user's
            if entry.stat().st_uid != os.geteuid():
                continue
            words = (entry / "cmdline").read_bytes().split(b"\0")
            at = next((place for place, word in enumerate(words) if word.endswith(GUARD)), None)
            if at is not None and len(words) > at + 1:
                folder = Path(os.fsdecode(words[at + 1]))
                found[folder] = (folder / RECORDS).stat().st_mtime
    return sorted(found, key=lambda folder: -found[folder])


def find_run(job: str | None) -> Path:
    """Return the folder of a run: of the latest on this machine, of a folder, or of a server with an address.

    Raises:
        UsageError: there is none.
    """
    if job is not None and (Path(job) / RECORDS).is_dir():
        return Path(job)
    runs = running()
    if job is None:
        return runs[0] if runs else last_run()
    for folder in runs:
        with suppress(UsageError):  # its servers do not listen yet
            if job in ClusterSpec.read(folder / CLUSTER_NAME).addresses:
                return folder
    if Path(job).is_dir():
        raise UsageError(f"{job} is no folder of a run: name one that has a folder '{RECORDS}'")
    known = ", ".join(str(folder) for folder in runs) or "none"
    raise UsageError(f"{job} is neither a folder nor an address of a run; name one of those that run here: {known}")


def last_run() -> Path:
    """Return the folder of the last run whose records were kept; raises UsageError where there is none."""
    kept = kept_runs_folder()
    found = sorted(path for path in kept.iterdir() if KEPT_NAME.match(path.name)) if kept and kept.is_dir() else []
    done = [path for path in found if not path.name.startswith(".")]
    if not done:
        raise UsageError(
            "no job of yours runs on this machine, and no records of an earlier one are kept; name the folder of a run "
            "(--run-dir of paceline run)"
        )
    return done[-1]
