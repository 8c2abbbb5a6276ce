"""Publishes models: which of their tensors lie where on the servers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

import msgspec
import torch
from torch import Tensor, nn

from paceline.core.calls import listed
from paceline.errors import UsageError
from paceline.torch_private import saved_buffers, uncompiled
from paceline.update.dtypes import dtype_name
from paceline.wire.versions import PublishedTensor, VersionLayout, encode_layout
from paceline.worker.parts import PartedTable
from paceline.worker.table import Table
from paceline.worker.validation import brief

if TYPE_CHECKING:
    from paceline.training.strategy import Distributed, HeldTensor
    from paceline.worker.publishing import Publication, Publisher

MAX_REST_BYTES: Final = 64 << 10  # of tensors that are on no server, such as counts in buffers: requests carry them
MAX_LAYOUT_BYTES: Final = 1 << 19
PUBLISHED_AS: Final = "policy"  # where no name is given
KEPT: Final = 3  # versions, where no number is given


class _Plan(msgspec.Struct, frozen=True):
    """Where the tensors of a model are: in tables, in the rest, or on no server (`absent`, by name)."""

    tensors: tuple[PublishedTensor, ...]
    tables: list[Table]
    rest: list[Tensor]
    absent: list[str]
    whole: bytes  # layout of a model without a rest

    @staticmethod
    def of(places: Sequence[tuple[str, HeldTensor]], rest: Mapping[str, Tensor], absent: list[str]) -> _Plan:
        """Lay out tensors by name: those that servers hold, and those that travel with each request."""
        tensors, at = list[PublishedTensor](), 0
        for name, one in places:
            shape = tuple(one.tensor.shape)
            tensors.append(PublishedTensor(name, one.table.name, one.start, shape, one.table.spec.dtype))
        for name, tensor in rest.items():
            dtype = dtype_name(tensor.dtype)
            tensors.append(PublishedTensor(name, "", at, tuple(tensor.shape), dtype))
            at += tensor.nbytes
        tables = {one.table.name: one.table for _, one in places}
        whole = b"" if rest else encode_layout(VersionLayout(tuple(tensors), b"", tuple(absent)))
        return _Plan(tuple(tensors), list(tables.values()), list(rest.values()), absent, whole)

    def layout(self) -> bytes:
        """Return the layout with the rest as it is now; raises UsageError if that is too large."""
        rest = b"".join(map(_bytes, self.rest))
        if len(rest) > MAX_REST_BYTES:
            raise UsageError(
                f"publish: buffers of the model that are on no server have {len(rest)} bytes, expected at most "
                f"{MAX_REST_BYTES}. Register them with persistent=False, or publish them as a table."
            )
        layout = self.whole or encode_layout(VersionLayout(self.tensors, rest, tuple(self.absent)))
        if len(layout) > MAX_LAYOUT_BYTES:
            raise UsageError(
                f"publish: the names and shapes of the model have {len(layout)} bytes, expected at most "
                f"{MAX_LAYOUT_BYTES}: publish parts of it under names of their own."
            )
        return layout


@dataclass(slots=True)
class ModelPublisher:
    """Publishes the models and tables of one worker.

    Args:
        publisher: asks the servers.
        optimizers: the distributed optimizers of the worker, which know where its tensors are.
    """

    publisher: Publisher
    optimizers: Collection[Distributed]
    # By model, with the optimizers for which it was made: to look through a large model takes milliseconds.
    _plans: WeakKeyDictionary[nn.Module, tuple[tuple[int, ...], _Plan]] = field(
        default_factory=WeakKeyDictionary[nn.Module, "tuple[tuple[int, ...], _Plan]"]
    )
    _all: tuple[tuple[int, ...], _Plan] | None = None

    def publish(self, what: object, name: str = PUBLISHED_AS, keep: int = KEPT) -> Publication:
        """Publish a model, or a table of a shape; see `paceline.publish`."""
        if isinstance(what, Table | PartedTable):
            table = what.whole if isinstance(what, PartedTable) else what
            return self.publisher.publish(name, keep, [table], encode_layout(VersionLayout(_of_table(what, table))))
        if not isinstance(what, nn.Module):
            raise UsageError(f"publish: {brief(what)} cannot be published, expected a model, or a table of a shape.")
        what = uncompiled(what)
        known = self._plans.get(what)
        if known is None or known[0] != self._made_for:
            known = self._plans[what] = self._made_for, _plan(what, self._held())
        plan = known[1]
        if plan.absent:
            self.publisher.tell_once(
                f"'{name}' is published without {listed(plan.absent)}, which no server holds: readers take them from "
                "elsewhere"
            )
        return self.publisher.publish(name, keep, plan.tables, plan.layout())

    def publish_all(self) -> None:
        """Publish all tensors that servers hold, under the names that their optimizers know them by, as one model."""
        if self._all is None or self._all[0] != self._made_for:
            held = self._held()
            num_of = Counter(each.name for each in held)
            named = [(one.name if num_of[one.name] == 1 else f"{one.table.name}.{one.name}", one) for one in held]
            self._all = self._made_for, _Plan.of(named, {}, [])
        plan = self._all[1]
        if plan.tables:
            self.publisher.publish(PUBLISHED_AS, KEPT, plan.tables, plan.layout())
        else:
            self.publisher.tell_once(
                "--publish has no effect here: no server holds a model. Train with paceline.distributed and a strategy "
                "of the parameter server, or call paceline.publish(table)"
            )

    @property
    def _made_for(self) -> tuple[int, ...]:
        return tuple(map(id, self.optimizers))

    def _held(self) -> list[HeldTensor]:
        return [held for optimizer in self.optimizers for held in optimizer.held_tensors()]


def _plan(model: nn.Module, held: Sequence[HeldTensor]) -> _Plan:
    """Find the parameters and the saved buffers of a model; raises UsageError if servers have none of them."""
    where = {id(one.tensor): one for one in held}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    saved = {**parameters, **_saved_buffers(model)}
    places = [(name, where[id(tensor)]) for name, tensor in saved.items() if id(tensor) in where]
    if not places:
        raise UsageError(
            "publish: no server holds parameters of this model. Have paceline.distributed(optimizer, model=model) make "
            "its optimizer, with a strategy of the parameter server."
        )
    others = {name: tensor for name, tensor in saved.items() if id(tensor) not in where}
    rest = {name: tensor for name, tensor in others.items() if name not in parameters}
    return _Plan.of(places, rest, [name for name in others if name in parameters])


def _saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that are saved with a model, by their full names."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name, buffer in saved_buffers(module)
    }


def _of_table(what: Table | PartedTable, table: Table) -> tuple[PublishedTensor, ...]:
    spec = table.spec
    if not isinstance(what, PartedTable):
        return (PublishedTensor(spec.name, spec.name, 0, table.shape, spec.dtype),)
    return tuple(
        PublishedTensor(part.name, spec.name, start, part.shape, spec.dtype)
        for part, start in zip(spec.segments, spec.offsets, strict=True)
    )


def _bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
