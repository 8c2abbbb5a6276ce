"""Position in a data source, as plain numbers that a checkpoint can hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.data.order import EpochOrder
from paceline.errors import UsageError

# The parameters of a sequence of batches, by name: a position is valid only for equal ones.
Terms = Mapping[str, int]

_HINT = "Give it what state_dict() of the same source returned, or start without a state."


@dataclass(frozen=True, slots=True)
class Position:
    """How far the workers have read an epoch together.

    Args:
        epoch: the current one, or the next one.
        num_done: batches of it (or items of an iterable) that all workers together were given.
    """

    epoch: int = 0
    num_done: int = 0


@dataclass(slots=True)
class PositionTracker:
    """The position reached in a source, and the start of the next pass.

    Args:
        terms: the parameters that positions in the source depend on.
        most: `num_done` at the end of an epoch; None if not known.
    """

    terms: Terms
    most: int | None = None
    reached: Position = Position()
    next: Position = Position()

    def start_pass(self) -> Position:
        """Begin a pass: return its start; the pass after it is of the following epoch."""
        self.reached, self.next = self.next, Position(self.next.epoch + 1)
        return self.reached

    def reach(self, num_done: int) -> None:
        """Record how much of the current epoch was given out."""
        self.reached = Position(self.reached.epoch, num_done if self.most is None else min(num_done, self.most))

    def end(self) -> None:
        """Record the end of the current epoch."""
        self.reached = Position(self.reached.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass one of this epoch: the rest of it if it is under way, else all of it.

        Raises:
            UsageError: the number of the epoch is not valid.
        """
        if not isinstance(epoch, int) or epoch < 0:  # pyright: ignore[reportUnnecessaryIsInstance] - from callers
            raise UsageError(f"the next epoch of a source is to be {epoch!r}, expected a whole number, from 0 on.")
        if epoch != self.next.epoch:
            self.reached = self.next = Position(epoch)

    def state_dict(self) -> dict[str, int]:
        """Return the position, as plain integers and booleans by name.

        >>> PositionTracker({"num_samples": 1000, "shuffled": True}).state_dict()
        {'epoch': 0, 'num_done': 0, 'num_samples': 1000, 'shuffled': True}
        """
        return {"epoch": self.reached.epoch, "num_done": self.reached.num_done, **self.terms}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at this position with the next pass.

        Raises:
            UsageError: the state is not valid, or is of another source; the message names both values.
        """
        self.reached = self.next = _read(state, self.terms, self.most)


def terms_of(order: EpochOrder, seed: int) -> dict[str, int]:
    """Return the parameters that a position in batches depends on."""
    return {
        "num_samples": order.num_samples,
        "batch_size": order.batch_size,
        "drop_last": order.drop_last,
        "shuffled": order.shuffled,
        "seed": seed,
    }


def _read(state: Mapping[str, Any], terms: Terms, most: int | None) -> Position:
    if not isinstance(state, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] - it comes from callers
        raise UsageError(f"a state of a source is {state!r}, expected a mapping of names to numbers. {_HINT}")
    expected = {"epoch", "num_done", *terms}
    if set(state) != expected:
        raise UsageError(f"a state with {_listed(state)} is not of this source, whose has {_listed(expected)}. {_HINT}")
    if wrong := [f"{name}={value!r}" for name, value in state.items() if not isinstance(value, int)]:
        raise UsageError(f"in a state of a source is {', '.join(wrong)}, expected whole numbers. {_HINT}")
    if other := [f"{name} {state[name]}, not {terms[name]}" for name in terms if state[name] != terms[name]]:
        raise UsageError(f"a state of another source, or of this one read otherwise: {'; '.join(other)}. {_HINT}")
    position = Position(int(state["epoch"]), int(state["num_done"]))
    if min(position.epoch, position.num_done) < 0 or (most is not None and position.num_done > most):
        raise UsageError(
            f"a state of a source is in epoch {position.epoch} after {position.num_done} of "
            f"{'any number' if most is None else most}, which is not a position in it. {_HINT}"
        )
    return position


def _listed(names: Mapping[str, Any] | set[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"
