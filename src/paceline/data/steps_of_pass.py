"""The steps that a worker takes in a pass over its batches, which tell whether others take one more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class StepsOfPass:
    """How many batches the steps of a pass have.

    A script may add up the gradients of several batches for a step, and step with what there is at the end of an epoch.
    A worker that gets one batch less than others may so take as many steps as they: its last one has fewer batches.

    Args:
        clock: returns the current clock of this worker, which a step finishes; None where there is no clock.

    Example:
        >>> clocks = iter([0, 0, 0, 1, 1, 2])  # before and after each of three batches: a step of two, and one of one
        >>> steps = StepsOfPass(lambda: next(clocks))
        >>> for _ in range(3):
        ...     steps.begin_batch()
        ...     steps.end_batch()
        >>> steps.others_step_again
        False
    """

    clock: Callable[[], int] | None
    _before: int = 0  # the clock when the loop was given its batch
    _usual: int = 0  # number of batches of the first step
    _last: int = 0  # of the last step
    _num_since: int = 0  # of those after the last step
    _is_regular: bool = True  # whether all steps but the last have as many batches as the first

    def begin_batch(self) -> None:
        """Note that the loop is given a batch."""
        if self.clock is not None:
            self._before = self.clock()

    def end_batch(self) -> None:
        """Note that the loop requests the next batch."""
        self._num_since += 1
        if self.clock is None or self.clock() == self._before:
            return
        self._is_regular = self._is_regular and self._last in (0, self._usual)
        self._usual = self._usual or self._num_since
        self._last, self._num_since = self._num_since, 0

    @property
    def others_step_again(self) -> bool:
        """Whether workers with one more batch in this pass take a step that this worker does not take."""
        if self.clock is None or not self._is_regular:
            return True
        if not self._last:
            return not self._num_since  # a loop without steps makes one behind it, or none, on all workers
        if self._num_since:  # it steps with the usual number alone
            return self._last != self._usual or self._num_since + 1 >= self._usual
        return self._last >= self._usual
