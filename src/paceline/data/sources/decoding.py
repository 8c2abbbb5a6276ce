"""Batches of an open source: records are decoded, transformed and collated."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Set as AbstractSet
from hashlib import blake2b
from typing import Final

import torch

from paceline.data.sources.batch_layout import Prepared
from paceline.data.sources.batches import BatchRequest, Faults, require_served
from paceline.data.sources.collating import FlatRecord, Unfit, collate, describe, flatten
from paceline.data.sources.recipe import BatchRecipe
from paceline.data.sources.samples import Samples
from paceline.data.sources.user_dataset import transform_at
from paceline.errors import PacelineError, RecordError, UsageError
from paceline.wire.malformed import story

_MOST_REASONS: Final = 5


class Transform:
    """A function of the user's that makes another record of each one."""

    def __init__(self, path: str, allowed_paths: AbstractSet[str] | None, seed: int) -> None:
        self._function, self._takes_generator = transform_at(path, allowed_paths)
        self._seed = seed

    def apply(self, record: object, epoch: int, index: int) -> object:
        """Return what becomes of a record; its chance depends on the seed, the epoch and the index alone."""
        if not self._takes_generator:
            return self._function(record)
        digest = blake2b(f"{self._seed},{epoch},{index}".encode(), digest_size=8).digest()
        return self._function(record, generator=torch.Generator().manual_seed(int.from_bytes(digest) >> 1))


class OpenRecords:
    """Batches of an open source, each record decoded and transformed by itself where it has to be."""

    def __init__(self, recipe: BatchRecipe, samples: Samples, transform: Transform | None) -> None:
        self._recipe = recipe
        self._samples = samples
        self._transform = transform
        self._num_skipped = 0
        self._reasons: list[str] = []

    @property
    def num_samples(self) -> int:
        """Number of samples of the source."""
        return self._samples.num_samples

    def fingerprint(self) -> str:
        """Return what tells different data apart; see `Records.fingerprint`."""
        described = json.dumps([self.num_samples, self._samples.describe()], sort_keys=True)
        return blake2b(described.encode(), digest_size=16).hexdigest()

    def prepare(self, ask: BatchRequest, max_bytes: int | None = None) -> Prepared:
        """Read and decode what a batch is made of; see `Records.prepare`."""
        indices = ask.indices
        if not indices:
            return Prepared(None, 0, 0)
        if min(indices) < 0 or max(indices) >= self.num_samples:
            raise UsageError(f"there is no sample {min(indices)} or {max(indices)}: there are {self.num_samples}.")
        self._samples.check()
        columns = None if self._transform is not None else self._samples.gather(indices)
        if columns is not None:
            return Prepared(columns, len(indices), 0)
        decoded = self._alike(ask, self._decoded(ask, max_bytes))
        num_skipped = len(indices) - len(decoded)
        return Prepared(collate(list(decoded.values())) if decoded else None, len(decoded), num_skipped)

    def faults(self) -> Faults:
        """Return what was skipped."""
        return Faults(self._num_skipped, tuple(self._reasons))

    def close(self) -> None:
        """Let go of the files."""
        self._samples.close()

    def _decoded(self, ask: BatchRequest, max_bytes: int | None) -> dict[int, FlatRecord]:
        """Return the records that can be decoded, by their place in the batch."""
        found: dict[int, FlatRecord] = {}
        size_bytes = 0
        # By index, as what is read one after the other lies one after the other.
        for place in sorted(range(len(ask.indices)), key=ask.indices.__getitem__):
            try:
                flat = found[place] = self._decode(ask.epoch, ask.indices[place])
            except RecordError as fault:
                self._note(fault)
                continue
            size_bytes += flat.size_bytes
            if max_bytes is not None:
                require_served(len(found), size_bytes, max_bytes)
        return {place: found[place] for place in sorted(found)}

    def _decode(self, epoch: int, index: int) -> FlatRecord:
        try:
            record = self._samples.record(index)
            return flatten(record if self._transform is None else self._transform.apply(record, epoch, index))
        except (PacelineError, MemoryError):
            raise  # not the record's fault
        except Unfit as error:
            raise self._fault(index, str(error)) from error
        except Exception as error:  # whatever code of the user's may raise
            raise self._fault(index, f"{type(error).__name__}: {error}") from error

    def _alike(self, ask: BatchRequest, decoded: dict[int, FlatRecord]) -> dict[int, FlatRecord]:
        """Return the records that are made up as most of them are: only those fit into one batch."""
        kinds = Counter(flat.kind for flat in decoded.values())
        if len(kinds) < 2:
            return decoded
        usual = kinds.most_common(1)[0][0]
        for place, flat in decoded.items():
            if flat.kind != usual:
                why = f"it is {describe(flat.kind)}, and most records of its batch are {describe(usual)}"
                self._note(self._fault(ask.indices[place], why))
        return {place: flat for place, flat in decoded.items() if flat.kind == usual}

    def _fault(self, index: int, why: str) -> RecordError:
        return RecordError(
            f"{self._samples.name(index)} could not be made part of a batch: {why}. Repair or remove it, or have such "
            "records left out and counted: on_error='skip'."
        )

    def _note(self, fault: RecordError) -> None:
        """Count a record that is left out; raise where none may be."""
        if self._recipe.on_error == "raise":
            raise fault
        self._num_skipped += 1
        if len(self._reasons) < _MOST_REASONS:
            self._reasons.append(story(fault))
