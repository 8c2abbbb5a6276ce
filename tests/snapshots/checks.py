"""What was pushed in a rehearsal, and what snapshots on disk have of it; reads their files by itself.

Every push leaves marks, so that values tell which pushes are in them. In the dense table each push has an element in
each of `NUM_BLOCKS` blocks, so that every server has some. Its rule, SGD with momentum 0.5, halves the momentum
of an element with every later update: what it is tells how many updates the push is old, and what the value has to be.
In the row table a push adds 1 to rows of its own, and to some that all share.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass, field
from math import log2
from pathlib import Path
from typing import Any

import numpy as np

NUM_BLOCKS = 7
NUM_SHARED = 5  # rows with the ids 0 to 4
FIRST_OWN_ROW = 1000
STATE = "momentum_buffer"
DTYPES = {"F32": np.dtype("<f4"), "I64": np.dtype("<i8")}

Arrays = dict[str, "np.ndarray[Any, Any]"]


class WrongSnapshotError(AssertionError):
    """A snapshot has or lacks what it must not; the message says which promise is broken."""


@dataclass(frozen=True)
class Made:
    """A push to both tables."""

    generation: int
    rank: int
    incarnation: int
    clock: int
    shared: tuple[int, ...]  # rows


@dataclass
class Content:
    """What is in the two tables: elements of the dense one, and rows by id."""

    values: np.ndarray[Any, Any]
    momentum: np.ndarray[Any, Any]
    rows: dict[int, list[float]]


@dataclass
class SnapshotHistory:
    """The pushes of all lives of a job, and checks of what servers or snapshots have of them.

    `is_exact`: updates show clock by clock. `is_bounded`: a cut waits for the clocks below it. `has_quorum`: clocks may
    close without a worker.
    """

    num_serials: int
    is_exact: bool
    is_bounded: bool
    has_quorum: bool
    made: dict[int, Made] = field(default_factory=dict)  # by serial number
    lost: set[tuple[int, int, int]] = field(default_factory=set)  # lives that were killed, with their generation
    committed: dict[str, int] = field(default_factory=dict)  # snapshots that were reported, and their clocks
    num_checked: int = 0

    @property
    def num_elements(self) -> int:
        return NUM_BLOCKS * self.num_serials

    def is_lost(self, made: Made) -> bool:
        """Return whether a push was made by a life that was killed, so that servers may lack it."""
        return (made.generation, made.rank, made.incarnation) in self.lost

    def check_folder(self, folder: Path) -> int:
        """Check every snapshot that is visible; return the clock of the newest, -1 without any."""
        found = sorted(folder.glob("snapshot-*"), key=lambda path: int(path.name.split("-")[1]))
        for path in found:
            self.check(path)
        newest = max((int(name.split("-")[1]) for name in self.committed), default=0)
        if newest and (not found or int(found[-1].name.split("-")[1]) < newest):
            names = [path.name for path in found]
            raise WrongSnapshotError(f"K2: snapshot-{newest} was reported, and there are {names}")
        return self.manifest_of(found[-1])["clock"] if found else -1

    def check(self, path: Path) -> None:
        """K1 and K3 of one snapshot, whose parts are all there."""
        manifest = self.manifest_of(path)
        clock, tables = manifest["clock"], {table["name"]: table for table in manifest["tables"]}
        if set(tables) != {"w", "rows"}:
            raise WrongSnapshotError(f"K1: {path.name} has the tables {sorted(tables)}")
        if self.is_bounded and {table["clock"] for table in tables.values()} != {clock} and self.is_exact:
            raise WrongSnapshotError(f"K1: {path.name} of clock {clock} has tables of other clocks")
        (source,) = manifest["sources"]  # of worker 0, which a quorum may have left behind
        if source["clock"] != clock and not (self.has_quorum and source["clock"] < clock):
            raise WrongSnapshotError(f"K3: {path.name} of clock {clock} has sources at {manifest['sources']}")
        self.check_content(path.name, self.content_of(path), clock)
        self.num_checked += 1

    def manifest_of(self, path: Path) -> dict[str, Any]:
        """Return the manifest of a snapshot, whose files are as it says, and so are those of its bases."""
        try:
            said, text = (path / "manifest.sha256").read_text(), (path / "manifest.json").read_bytes()
        except FileNotFoundError as error:
            raise WrongSnapshotError(f"K1: {path.name} is visible, and {error.filename} is not there") from error
        if said != hashlib.sha256(text).hexdigest():
            raise WrongSnapshotError(f"K1: {path.name} is visible without its manifest")
        manifest = json.loads(text)
        for entry in manifest["files"]:
            file = path / entry["name"]
            if not file.exists() or hashlib.sha256(file.read_bytes()).hexdigest() != entry["sha256"]:
                raise WrongSnapshotError(f"K1: {path.name} is visible, and {entry['name']} is not whole")
        if manifest["base"]:
            base = path.with_name(manifest["base"])
            if not base.exists() or (base / "manifest.sha256").read_text() != manifest["base_sha256"]:
                raise WrongSnapshotError(f"K2: {path.name} is based on {base.name}, which is not there")
        return manifest

    def content_of(self, path: Path) -> Content:
        """Return what a snapshot and its bases have."""
        manifest = self.manifest_of(path)
        table = next(table for table in manifest["tables"] if table["name"] == "w")
        (values,) = arrays_of(path / table["values"]).values()
        states = [arrays_of(path / file) for name, file in table["states"].items() if name == STATE]
        momentum = next(iter(states[0].values())) if states else np.zeros_like(values)
        return Content(values, momentum, self._rows_of(path, manifest))

    def _rows_of(self, path: Path, manifest: dict[str, Any]) -> dict[int, list[float]]:
        table = next(table for table in manifest["tables"] if table["name"] == "rows")
        found = dict[int, list[float]]()
        if table["changed_only"]:
            base = path.with_name(manifest["base"])
            found = self._rows_of(base, self.manifest_of(base))
        for removed in arrays_of(path / table["removed"])["ids"].tolist() if table["removed"] else ():
            found.pop(removed, None)
        for name in table["rows"]:
            arrays = arrays_of(path / name)
            found.update(zip(arrays["ids"].tolist(), arrays["values"].tolist(), strict=True))
        return found

    def check_content(self, where: str, content: Content, clock: int) -> None:
        """Check what is in the tables at a clock, below which all is to be in them."""
        ages = self._ages(where, content)
        has = self._marked(where, ages, clock)
        for serial, made in self.made.items():
            is_due = self.is_bounded and made.clock < clock and not self.is_lost(made)
            if is_due and not self.has_quorum and serial not in has:
                raise WrongSnapshotError(f"K3: {where} of clock {clock} lacks {made}")
            if self.is_exact and made.clock >= clock and serial in has:
                raise WrongSnapshotError(f"K1: {where} of clock {clock} has {made}")
        if self.is_exact:
            self._check_ages(where, ages, has)
        self._check_rows(where, content.rows, has)

    def _ages(self, where: str, content: Content) -> np.ndarray[Any, Any]:
        """Return how many updates ago each element was pushed, 0 if it was not; checks values against that."""
        if content.values.shape != (self.num_elements,) or content.momentum.shape != (self.num_elements,):
            raise WrongSnapshotError(f"K1: {where} has {content.values.shape} values")
        ages = np.zeros(self.num_elements, dtype=int)
        for at in np.flatnonzero(content.momentum).tolist():
            ages[at] = 1 - round(log2(content.momentum[at])) if content.momentum[at] > 0 else -1
        expected = np.array([value_after(age) for age in range(max(ages.max(), 0) + 1)], dtype=np.float32)
        momenta = np.where(ages > 0, 2.0 ** (1.0 - ages), 0.0)
        if ages.min() < 0 or (content.momentum != momenta).any() or (content.values != expected[ages]).any():
            at = int(np.flatnonzero((content.momentum != momenta) | (content.values != expected[ages]))[0])
            raise WrongSnapshotError(
                f"K3: element {at} in {where} is {content.values[at]} with a momentum of {content.momentum[at]}, which "
                "no number of updates makes: a push counts twice, or values and state are of two moments"
            )
        return ages

    def _marked(self, where: str, ages: np.ndarray[Any, Any], clock: int) -> set[int]:
        """Return the pushes that are in the dense table; each with all its parts, if updates show clock by clock."""
        blocks = ages.reshape(NUM_BLOCKS, self.num_serials)
        for serial in np.flatnonzero(blocks.any(0)).tolist():
            made = self.made.get(serial)
            if made is None:
                raise WrongSnapshotError(f"K5: {where} has the push {serial}, which no worker of this job made")
            is_whole = self.is_exact or (self.is_bounded and made.clock < clock and not self.is_lost(made))
            if is_whole and not blocks[:, serial].all():
                raise WrongSnapshotError(f"K1: {where} has some parts of {made}")
        return set(np.flatnonzero(blocks.all(0)).tolist())

    def _check_ages(self, where: str, ages: np.ndarray[Any, Any], has: set[int]) -> None:
        """Each clock is one update on every server: its pushes are as old as there are clocks since then."""
        blocks, clocks = ages.reshape(NUM_BLOCKS, self.num_serials), {self.made[serial].clock for serial in has}
        for serial in has:
            made = self.made[serial]
            expected = 1 + sum(clock > made.clock for clock in clocks)
            if (blocks[:, serial] != expected).any():
                raise WrongSnapshotError(f"K4: {where} has {made} {blocks[:, serial]} updates ago, expected {expected}")

    def _check_rows(self, where: str, rows: dict[int, list[float]], has: set[int]) -> None:
        found = {(each - FIRST_OWN_ROW) // NUM_BLOCKS for each in rows if each >= FIRST_OWN_ROW}
        if self.is_exact and found != has:
            raise WrongSnapshotError(f"K1: {where} has {sorted(found ^ has)} in one table and not in the other")
        counts = [0] * NUM_SHARED
        for serial in found:
            if serial not in self.made:
                raise WrongSnapshotError(f"K5: {where} has rows of the push {serial}, which no worker of this job made")
            own = [rows.get(each, [0.0, 0.0]) for each in own_rows(serial)]
            if any(row not in ([1.0, 1.0], [0.0, 0.0]) for row in own) or (self.is_exact and [0.0, 0.0] in own):
                raise WrongSnapshotError(f"K1: {where} has of {self.made[serial]} the rows {own}")
            for row in self.made[serial].shared:
                counts[row] += 1
        if self.is_exact:
            shared = [rows.get(row, [0.0, 0.0]) for row in range(NUM_SHARED)]
            if shared != [[float(each)] * 2 for each in counts]:
                raise WrongSnapshotError(f"K1: {where} has {shared} in rows that were pushed {counts} times")


def own_rows(serial: int) -> list[int]:
    """Return the ids of the rows that only this push has."""
    return [FIRST_OWN_ROW + serial * NUM_BLOCKS + block for block in range(NUM_BLOCKS)]


def value_after(age: int) -> np.float32:
    """Return what an element is after so many updates, of which the first has pushed 1 there."""
    value, momentum = np.float32(0.0), np.float32(1.0)
    for _ in range(age):
        value -= momentum
        momentum /= np.float32(2.0)
    return value


def arrays_of(path: Path) -> Arrays:
    """Read a file of safetensors."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    header.pop("__metadata__", None)
    return {
        name: np.frombuffer(data[slice(*entry["data_offsets"])], DTYPES[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in header.items()
    }
