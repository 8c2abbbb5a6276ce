"""Collectives of workers on several machines: in the memory of each, and between machines by one worker of each.

So a tensor travels between two machines once, however many workers they have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, final

import msgspec
import torch
from torch import Tensor

from paceline.collective.exchange import Combine, RoundsExchange
from paceline.collective.rounds import Call
from paceline.errors import UsageError
from paceline.transport.deadline import Deadline

# A worker that waits for another one, which waits itself, learns from that one which worker is late.
_LATER_S: Final = 2.0

Act = Callable[[Deadline], None]


class Layout(msgspec.Struct, frozen=True):
    """Which worker of a group is on which machine.

    Args:
        rank: of this worker.
        machines: the ranks on each, in their order; machines are in the order of their first ranks.

    Example:
        >>> layout = Layout.of(2, ["a", "b", "a"])
        >>> layout.machines, layout.own, layout.here, layout.most
        (((0, 2), (1,)), 0, 1, 2)
    """

    rank: int
    machines: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(rank: int, names: Sequence[str]) -> Layout:
        """Return the layout of workers on machines of these names, by rank."""
        ranks = [tuple(i for i, other in enumerate(names) if other == name) for name in dict.fromkeys(names)]
        return Layout(rank, tuple(ranks))

    def find(self, rank: int) -> tuple[int, int]:
        """Return the machine of a worker, and its place there."""
        return next((number, ranks.index(rank)) for number, ranks in enumerate(self.machines) if rank in ranks)

    @property
    def own(self) -> int:
        """The machine of this worker."""
        return self.find(self.rank)[0]

    @property
    def here(self) -> int:
        """The place of this worker on its machine; the first speaks with other machines."""
        return self.find(self.rank)[1]

    @property
    def neighbours(self) -> tuple[int, ...]:
        """The ranks on this machine."""
        return self.machines[self.own]

    @property
    def first_ranks(self) -> list[int]:
        """The ranks of the workers that speak between machines."""
        return [ranks[0] for ranks in self.machines]

    @property
    def most(self) -> int:
        """How many workers the fullest machine has."""
        return max(map(len, self.machines))


@final
class MachinesExchange:
    """Collectives in three parts: to the first worker of each machine, between these, and from them to the others.

    Sums are those of machines, each added in the order of ranks, added in the order of machines: all workers get the
    same bits. Where calls differ on one machine, or between machines, all workers are told.

    What is for or from single workers is arranged as (machines, workers of the fullest machine, values).

    Args:
        near: among the workers of this machine.
        between: among the first workers of machines; None for the others.
    """

    def __init__(self, layout: Layout, near: RoundsExchange, between: RoundsExchange | None) -> None:
        self._layout = layout
        self._near = near
        self._between = between
        self._own: Final = layout.own
        self._here: Final = layout.here
        self._num_here: Final = len(layout.neighbours)
        self._is_first: Final = between is not None

    def all_reduce(self, call: Call, flat: Tensor, combine: Combine, deadline: Deadline) -> None:
        """Reduce and give to all; see `Exchange`."""
        self._run(
            deadline,
            lambda until: self._near.reduce(call, flat, combine, 0, until),
            lambda between, until: between.all_reduce(call, flat, combine, until),
            lambda until: self._near.broadcast(call, flat, 0, until),
        )

    def reduce(self, call: Call, flat: Tensor, combine: Combine, root: int, deadline: Deadline) -> None:
        """Reduce to the root; see `Exchange`."""
        machine, _ = self._layout.find(root)
        is_root = self._layout.rank == root
        total = flat if is_root or not self._is_first else flat.clone()
        self._run(
            deadline,
            lambda until: self._near.reduce(call, total, combine, 0, until),
            lambda between, until: between.reduce(call, total, combine, machine, until),
            lambda until: self._hand_over(call, total, root, until),
        )

    def broadcast(self, call: Call, flat: Tensor, root: int, deadline: Deadline) -> None:
        """Give all the root's tensor; see `Exchange`."""
        machine, place = self._layout.find(root)
        has_root = machine == self._own

        def collect(until: Deadline) -> None:
            if has_root:
                self._near.broadcast(call, flat, place, until)
            else:
                self._near.barrier(call, until)

        def deliver(until: Deadline) -> None:
            if has_root:
                self._near.barrier(call, until)
            else:
                self._near.broadcast(call, flat, 0, until)

        self._run(deadline, collect, lambda between, until: between.broadcast(call, flat, machine, until), deliver)

    def all_gather(self, call: Call, flat: Tensor, found: Sequence[Tensor], deadline: Deadline) -> None:
        """Give all to all; see `Exchange`."""
        whole = self._arranged(flat)
        rows = [row.view(-1) for row in whole]

        def deliver(until: Deadline) -> None:
            self._near.broadcast(call, whole.view(-1), 0, until)
            self._copy_out(whole, found)

        self._run(
            deadline,
            lambda until: self._near.gather(call, flat, self._places(whole[self._own]), 0, until),
            lambda between, until: between.all_gather(call, rows[self._own], rows, until),
            deliver,
        )

    def gather(self, call: Call, flat: Tensor, found: Sequence[Tensor], root: int, deadline: Deadline) -> None:
        """Give all to the root; see `Exchange`."""
        machine, _ = self._layout.find(root)
        whole = self._arranged(flat) if self._is_first or self._own == machine else flat.view(1, 1, -1)
        rows = [row.view(-1) for row in whole]

        def deliver(until: Deadline) -> None:
            self._hand_over(call, whole.view(-1), root, until)
            if self._layout.rank == root:
                self._copy_out(whole, found)

        self._run(
            deadline,
            lambda until: self._near.gather(
                call, flat, self._places(whole[self._own]) if self._is_first else [], 0, until
            ),
            lambda between, until: between.gather(call, rows[self._own], rows, machine, until),
            deliver,
        )

    def scatter(self, call: Call, given: Sequence[Tensor], own: Tensor, root: int, deadline: Deadline) -> None:
        """Give each what the root has for it; see `Exchange`."""
        machine, place = self._layout.find(root)
        has_root = machine == self._own
        whole = self._arranged(own) if has_root else own
        if given:
            self._copy_in(given, whole)
        mine = own.new_zeros(self._layout.most, len(own))

        def collect(until: Deadline) -> None:
            if has_root:
                self._near.broadcast(call, whole.view(-1), place, until)
            else:
                self._near.barrier(call, until)

        def between(leads: RoundsExchange, until: Deadline) -> None:
            rows = [row.view(-1) for row in whole] if has_root else []
            leads.scatter(call, rows, mine.view(-1), machine, until)

        self._run(deadline, collect, between, lambda until: self._near.scatter(call, self._places(mine), own, 0, until))

    def reduce_scatter(
        self, call: Call, given: Sequence[Tensor], own: Tensor, combine: Combine, deadline: Deadline
    ) -> None:
        """Give each the reduction of what is for it; see `Exchange`."""
        whole = self._arranged(own)
        self._copy_in(given, whole)
        mine = own.new_zeros(self._layout.most, len(own))
        self._run(
            deadline,
            lambda until: self._near.reduce(call, whole.view(-1), combine, 0, until),
            lambda between, until: between.reduce_scatter(
                call, [row.view(-1) for row in whole], mine.view(-1), combine, until
            ),
            lambda until: self._near.scatter(call, self._places(mine), own, 0, until),
        )

    def all_to_all(self, call: Call, given: Sequence[Tensor], found: Sequence[Tensor], deadline: Deadline) -> None:
        """Give each what all have for it; see `Exchange`."""
        mine = self._arranged(found[0])
        self._copy_in(given, mine)
        # By worker of this machine, then by machine and place of the worker that it is for; then by the one it is from.
        leaving = mine.new_zeros(self._layout.most, *mine.shape) if self._is_first else mine
        coming = mine.new_zeros(len(mine), self._layout.most, *mine.shape[1:]) if self._is_first else mine

        def between(leads: RoundsExchange, until: Deadline) -> None:
            rows = [leaving[:, machine].contiguous().view(-1) for machine in range(len(mine))]
            leads.all_to_all(call, rows, [row.view(-1) for row in coming], until)

        def deliver(until: Deadline) -> None:
            rows = [coming[:, :, place].contiguous().view(-1) for place in range(self._num_here)]
            self._near.scatter(call, rows if self._is_first else [], mine.view(-1), 0, until)
            self._copy_out(mine, found)

        self._run(
            deadline,
            lambda until: self._near.gather(call, mine.view(-1), self._flat_places(leaving), 0, until),
            between,
            deliver,
        )

    def barrier(self, call: Call, deadline: Deadline) -> None:
        """Wait for all; see `Exchange`."""
        self._run(
            deadline,
            lambda until: self._near.barrier(call, until),
            lambda between, until: between.barrier(call, until),
            lambda until: self._near.barrier(call, until),
        )

    def close(self) -> None:
        """Release the memory of both; see `Exchange`."""
        self._near.close()
        if self._between is not None:
            self._between.close()

    # -- the three parts ---------------------------------------------------------------------------------------------

    def _run(
        self, deadline: Deadline, collect: Act, between: Callable[[RoundsExchange, Deadline], None], deliver: Act
    ) -> None:
        """Make the parts of a call, each of at least one round, so that no worker goes on where another is refused."""
        later, last = (Deadline(deadline.at_s + num * _LATER_S) for num in (1, 2))
        first = self._between
        try:
            collect(deadline)
        except UsageError as error:
            if first is not None:
                first.refuse(str(error), later)
            raise
        if first is not None:
            try:
                between(first, later)
            except UsageError as error:
                self._near.refuse(str(error), last)
                raise
        deliver(last)

    def _hand_over(self, call: Call, tensor: Tensor, root: int, until: Deadline) -> None:
        """Give the root what the first worker of its machine has."""
        machine, place = self._layout.find(root)
        if machine == self._own and place:
            self._near.broadcast(call, tensor if self._here in (0, place) else torch.empty_like(tensor), 0, until)
        else:
            self._near.barrier(call, until)

    # -- tensors of single workers -----------------------------------------------------------------------------------

    def _arranged(self, one: Tensor) -> Tensor:
        """Return memory for a tensor of each worker."""
        return one.new_zeros(len(self._layout.machines), self._layout.most, len(one))

    def _places(self, row: Tensor) -> list[Tensor]:
        """Return what the first worker has for each worker of its machine; the others have nothing."""
        return list(row[: self._num_here]) if self._is_first else []

    def _flat_places(self, rows: Tensor) -> list[Tensor]:
        return [row.view(-1) for row in self._places(rows)]

    def _copy_in(self, given: Sequence[Tensor], whole: Tensor) -> None:
        for rank, tensor in enumerate(given):
            machine, place = self._layout.find(rank)
            whole[machine, place].copy_(tensor)

    def _copy_out(self, whole: Tensor, found: Sequence[Tensor]) -> None:
        for rank, tensor in enumerate(found):
            machine, place = self._layout.find(rank)
            tensor.copy_(whole[machine, place])
