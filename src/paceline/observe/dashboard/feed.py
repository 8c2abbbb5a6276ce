"""Follows runs and says what has changed: one message for all pages that are open, made once."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec

from paceline.observe.dashboard.history import STALENESS_BARS, RunHistory
from paceline.observe.equality import LossComparison
from paceline.observe.progress import RunView
from paceline.observe.screen import as_data

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

PIECE_BYTES: Final = 1 << 18  # of each trace, that are read at once
_PATIENCE_S: Final = 0.5  # in which pieces are read before what they say is shown


@dataclass(slots=True)
class FollowedRun:
    """A run in a folder, from its first record on."""

    label: str
    folder: Path
    view: RunView = field(init=False)
    history: RunHistory = field(default_factory=RunHistory)
    has_ended: bool = False
    _shown: dict[str, object] = field(default_factory=dict[str, object])

    def __post_init__(self) -> None:
        """Know nothing yet."""
        self.view = RunView(self.folder / "trace", piece_bytes=PIECE_BYTES)

    def refresh(self) -> None:
        """Read what is new, or a part of it if that is much."""
        if self.has_ended:
            return
        deadline_s = time.monotonic() + _PATIENCE_S
        over = self.view.has_ended()  # before the last records are read
        while True:
            self.history.add_all(self.view.refresh(time.monotonic()))
            if not self.view.is_behind or time.monotonic() >= deadline_s:
                break
        self.has_ended = over and not self.view.is_behind
        self._shown = as_data(self.view.picture())

    def news(self, *, whole: bool) -> dict[str, object]:
        """Return what the page is told of this run."""
        return {
            "label": self.label,
            "state": "ended" if self.has_ended else "reading" if self.view.is_behind else "running",
            "elapsed_s": round(self.view.recorded_s, 1),
            "read_share": round(self.view.read_share, 2),
            "now": self._shown,
            **self.history.news(whole=whole),
        }


class Feed:
    """Several runs, as messages for pages.

    One thread calls `publish`; others wait for what it says. Nothing is kept for a page: one that has missed a message
    gets everything anew.

        feed = Feed([Path("runs/a")], ["a"])
        feed.publish()
        version, message = feed.wait_since(0, timeout_s=5.0)
    """

    def __init__(self, folders: Sequence[Path], labels: Sequence[str]) -> None:
        """Follow these runs, and compare each with the first."""
        self._runs = [FollowedRun(label, folder) for label, folder in zip(labels, folders, strict=True)]
        self._comparisons = [LossComparison(folders[0], folder) for folder in folders[1:]]
        self._changed = threading.Condition()
        self._version = 0
        self._news = b""
        self._num_looking = 0
        self._closed = False

    @property
    def num_looking(self) -> int:
        """How many pages are open."""
        return self._num_looking

    @property
    def is_closed(self) -> bool:
        """Whether it says nothing any more."""
        return self._closed

    @property
    def has_ended(self) -> bool:
        """Whether no run goes on."""
        return all(run.has_ended for run in self._runs)

    def publish(self) -> None:
        """Read what is new, and tell all that wait; does nothing once all runs have ended and were told of."""
        if self.has_ended and self._news:
            return
        with self._changed:
            for run in self._runs:
                run.refresh()
            for comparison in self._comparisons:
                comparison.advance()
            self._news = self._message(whole=False)
            for run in self._runs:
                run.history.note_told()
            self._version += 1
            self._changed.notify_all()

    def wait_since(self, version: int, timeout_s: float) -> tuple[int, bytes]:
        """Return the latest version and what has changed since `version`, 0 for nothing known.

        Blocks until there is something new, `timeout_s` seconds at most; the message is empty if nothing came.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._version > version or self._closed, timeout_s)
            if self._version == version:
                return version, b""
            missed = self._version != version + 1
            return self._version, self._message(whole=True) if missed or not version else self._news

    def note_looking(self, change: int) -> None:
        """Count a page that is opened or closed."""
        with self._changed:
            self._num_looking += change

    def close(self) -> None:
        """Say nothing new any more; what was said last is still told."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _message(self, *, whole: bool) -> bytes:
        return msgspec.json.encode(
            {
                "whole": whole,
                "bars": STALENESS_BARS,
                "runs": [run.news(whole=whole) for run in self._runs],
                "compared": [comparison.text() for comparison in self._comparisons],
            }
        )
