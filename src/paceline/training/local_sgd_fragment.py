"""Some tensors of a worker that steps by itself, and what they were when it last heard of the others."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.node.mirror import Mirror
from paceline.node.outgoing import PushOutcome
from paceline.node.table import Asked, Table
from paceline.training.flat import Flat
from paceline.training.state import StateOf, send_state
from paceline.training.weights import Weights


@dataclass(slots=True)
class Fragment:
    """Tensors that are exchanged together, through a table of their own.

    Args:
        turn: which turn of a round is theirs.
        flat: the tensors.
        table: the servers' values of them.
    """

    turn: int
    flat: Flat
    table: Table
    num_samples: float = 0.0  # behind what this worker has done since its last push
    weights: Weights = field(init=False)
    # (elements of all,): the servers' values as this worker took them last. What it has done is the way from there.
    _anchor: Tensor = field(init=False)
    _asked: Asked | None = None
    _is_owing: bool = False  # whether what was asked for is without this worker's steps, which it has yet to push

    def __post_init__(self) -> None:
        """Start from the servers' values."""
        self.weights = Weights(self.flat, self.table)
        self._anchor = self.flat.empty()
        self.start()

    def start(self) -> None:
        """Set the tensors to the servers' values, whatever was done; blocks until those are fresh."""
        self._asked = None
        self.table.read(self._note)
        self.flat.unpack(self._anchor)
        self.num_samples = 0.0

    def push(self) -> Future[PushOutcome]:
        """Send how far this worker has come, as a gradient; return how that will end.

        Raises:
            UsageError: it is not finite, under nonfinite="halt".
        """
        buffer = self.table.node.reserve(self.table.name)
        self.write_way(buffer.gradient)
        samples, self.num_samples = self.num_samples, 0.0
        return self.table.push_reserved(buffer, samples=samples, absent=(), hyper=())

    def write_way(self, out: Tensor) -> None:
        """Write the old values minus the new ones to (elements of all,): a gradient points uphill."""
        self.flat.pack_values(out)
        torch.sub(self._anchor, out, out=out)

    def ask(self, *, is_owing: bool) -> None:
        """Ask for the values of this round; `take` waits for them."""
        self._asked, self._is_owing = self.table.ask(), is_owing

    def take(self, merge: float) -> None:
        """Wait for the values that were asked for, if any, and go on from them.

        Args:
            merge: how far to go from the tensors as they are towards the values; 1 is all the way. A worker that owes
                its steps goes as far as the values went, so that it still has them to push.
        """
        asked, self._asked = self._asked, None
        if asked is None:
            return
        before = self._anchor.clone() if self._is_owing else None
        self.table.take(asked, self._note)
        if before is not None:
            self._add(self._anchor - before)
        elif merge == 1.0:
            self.flat.unpack(self._anchor)
        else:
            self._move(merge)

    def load(self, state: Mapping[int, dict[str, Tensor]]) -> None:
        """Set the servers' values to the tensors as they are here, and the state of their rule to this one; blocks."""
        loaded: StateOf = dict(state)
        send_state(self.table, loaded, self.flat)

    def unsent(self) -> dict[str, Any] | None:
        """Return what this worker has that the servers' values lack; None if that is nothing. Blocks for these values.

        "common" are the values, "own" what the tensors hold where they are the start, both (elements of all,).
        """
        newest, own = self.flat.empty(), self.flat.empty()

        def take(mirror: Mirror) -> None:
            newest.copy_(mirror.readable().slice(0, self.flat.numel))

        self.table.read(take, exact=self.table.consistency.bound is not None)
        self.flat.pack_values(own)
        is_coming = self._asked is not None and not self._is_owing
        if not is_coming:
            own += newest - self._anchor  # what others have done meanwhile
        if not is_coming and not self.num_samples and torch.equal(own, newest):
            return None
        return {"common": newest, "own": own, "num_samples": self.num_samples, "is_coming": is_coming}

    def require_fitting(self, unsent: Mapping[str, Any] | None) -> None:
        """Raise UsageError unless this may have come from `unsent` of the same fragment of the same model."""
        shapes = [] if unsent is None else [tuple(unsent[name].shape) for name in ("common", "own")]
        if any(shape != (self.flat.numel,) for shape in shapes):
            raise UsageError(
                f"what is unsent of table '{self.table.name}' has shape {shapes[0]}, expected ({self.flat.numel},): it "
                "is of another model, or of other fragments."
            )

    def go_back(self, unsent: Mapping[str, Any]) -> None:
        """Set the tensors to the servers' values, if they hold what they held when these were unsent."""
        now = self.flat.empty()
        self.flat.pack_values(now)
        if torch.equal(now, unsent["own"]):
            self.flat.unpack(unsent["common"])

    def resume(self, unsent: Mapping[str, Any]) -> None:
        """Go on from what was unsent, after `start`, if the servers have the values that belong to it."""
        if not torch.equal(self._anchor, unsent["common"]):
            return
        self.flat.unpack(unsent["own"])
        self.num_samples = unsent["num_samples"]
        if unsent["is_coming"]:
            self.ask(is_owing=False)

    def _note(self, mirror: Mirror) -> None:
        self._anchor.copy_(mirror.readable().slice(0, self.flat.numel))

    @torch.no_grad()
    def _add(self, change: Tensor) -> None:
        for tensor, part in zip(self.flat.tensors, self.flat.parts(change), strict=True):
            tensor.add_(part.to(tensor.device))

    @torch.no_grad()
    def _move(self, merge: float) -> None:
        for tensor, part in zip(self.flat.tensors, self.flat.parts(self._anchor), strict=True):
            tensor.lerp_(part.to(tensor.device), merge)
