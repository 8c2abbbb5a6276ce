"""Embedding layers whose rows live on the servers: replacements of `torch.nn.Embedding` and `EmbeddingBag`."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Sequence
from types import FrameType
from typing import Final, Literal, Self, TypeAlias, TypedDict, Unpack, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.api.script import current
from paceline.api.session import Session
from paceline.core.calls import checked, checked_late, shortened
from paceline.core.consistency import Consistency
from paceline.errors import NoWeight, UsageError
from paceline.training.embedding_gradients import EmbeddingLookup
from paceline.update.dtypes import dtype_name
from paceline.update.rates import divided
from paceline.update.rows.spec import FilterSpec, First, Lifecycle
from paceline.update.rules import RuleSpec
from paceline.update.table import DType, NonFinite, Scale
from paceline.worker.rows.managed import Managed
from paceline.worker.rows.table import RowTable
from paceline.worker.validation import brief

_DEPTH: Final = 8  # calls from a module's `requires_grad_` to where it looks into modules inside: 5 in torch 2.9
Mode: TypeAlias = Literal["sum", "mean", "max"]

# Errors of torch that no argument is to blame for; the second is of torch 2.8 and later.
_OF_A_DEVICE: Final = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))
_NO_WEIGHT: Final = (
    "table '{0}': the rows of this layer live on the servers, so it has no `weight` that another layer could share or "
    "that could be set. To tie an output layer to it, multiply by the rows that are needed, hidden @ layer(ids).T; if "
    "all are needed in every step, use torch.nn.Embedding, whose weight paceline.distributed trains with the rest. "
    "Rows are read by layer.table.pull(ids) and written by layer.table.load(path)."
)


class _TableSettings(TypedDict):
    """Settings of a row table; see `Session.table`."""

    update: RuleSpec
    consistency: Consistency | str | None
    scale: Scale | None
    nonfinite: NonFinite
    cache: bool | None
    cache_rows: int
    life: Lifecycle
    filters: Sequence[FilterSpec]
    communication: Managed | None


class _RowLayer(nn.Module):
    """Base of layers whose rows live on the servers. `_lookup` is set once the table is open."""

    _lookup: EmbeddingLookup
    _learns = True

    def __init__(
        self,
        ps: Session,
        name: str,
        num_embeddings: int | None,
        embedding_dim: int,
        padding_idx: int | None,
        max_norm: float | None,
        init: float | First | None,
        dtype: torch.dtype | None,
        **settings: Unpack[_TableSettings],
    ) -> None:
        super().__init__()
        padding_idx = _padding(name, num_embeddings, padding_idx, max_norm)
        # Without `init` the values of torch, which differ from table to table.
        first = First("normal", 1.0, zlib.crc32(name.encode())) if init is None else init
        rule = settings["update"]
        is_rule = isinstance(rule, RuleSpec)  # pyright: ignore[reportUnnecessaryIsInstance] - scripts are not typed
        if is_rule and ps.divide_lr and ps.policy(settings["consistency"]).visible == "on_arrival":
            settings["update"] = divided(rule, ps.size)
        table = ps.table(name, rows=embedding_dim, init=first, dtype=_dtype(dtype), **settings)
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx
        self.max_norm = max_norm
        self._lookup = ps.lookups.over(table, num_embeddings, padding_idx)

    @property
    def table(self) -> RowTable:
        """The row table, for direct pulls and pushes."""
        return self._lookup.table

    @property
    def num_refused(self) -> int:
        """Number of this worker's pushes that were not applied (not finite, or late under backup)."""
        return self._lookup.num_refused

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Train or freeze the rows; applies to later forwards.

        `requires_grad_` of an enclosing module reaches the rows, too. A loop over `model.parameters()` does not,
        because rows are not parameters.
        """
        super().requires_grad_(requires_grad)
        self._learns = requires_grad
        return self

    @property
    def _parameters(self) -> dict[str, nn.Parameter | None]:
        """The parameters, none. Read by `requires_grad_` of an enclosing module, which is detected here."""
        asked = _asked_by_requires_grad(inspect.currentframe())
        if asked is not None:
            self._learns = asked
        return self.__dict__["_parameters"]

    @_parameters.setter
    def _parameters(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, parameters: dict[str, nn.Parameter | None]
    ) -> None:
        self.__dict__["_parameters"] = parameters

    @checked_late
    def prefetch(self, ids: Tensor, *, ahead: int = 1) -> None:
        """Pull the rows of a batch `ahead` clocks from now; forward uses them if its ids are among these.

        The rows are as fresh as the consistency requires at that clock: under bsp the same bits as without a prefetch;
        under other policies possibly older, and without own pushes made after this call unless the cache adds those
        (cache=True with a rule that adds, or plain SGD). Does not block. At most eight requests are kept per future
        clock; further calls do nothing.
        """
        self._lookup.prefetch(ids, ahead)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that were collected since the clock began."""
        super().zero_grad(set_to_none)
        self._lookup.zero_grad()

    def __getattr__(self, name: str) -> Tensor | nn.Module:
        """Raise an error that explains why there is no `weight`."""
        if name == "weight":
            raise NoWeight(_NO_WEIGHT.format(self._lookup.table.name))
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Tensor | nn.Module) -> None:
        """Refuse a `weight`, which would have no effect."""
        if name == "weight":
            raise NoWeight(_NO_WEIGHT.format(self._lookup.table.name))
        super().__setattr__(name, value)


class Embedding(_RowLayer):
    """A lookup table used like `torch.nn.Embedding`, whose rows live on the servers and learn there.

    It has no parameters, so optimizers and `state_dict` of the model do not see it. Forward pulls the distinct rows of
    its ids as the consistency requires; backward collects their gradients, and the end of the clock (`step` of a
    distributed optimizer, or `Session.clock`) pushes them, once. `zero_grad` of such an optimizer, or of this module,
    drops them. While gradients are off nothing is collected; in `snapshot` of an optimizer reads are exact. A copy
    (`copy.deepcopy`) reads and trains the same rows, and is frozen by itself.

    Args:
        num_embeddings: ids are below this; None takes any 64-bit ids, whose rows are stored from their first push.
        embedding_dim: width of a row.
        padding_idx: an id whose row is zeros and is not trained.
        max_norm: must be None: lookups do not change rows. Weight decay of the rule keeps them small.
        norm_type: goes with `max_norm`.
        scale_grad_by_freq: divide the gradient of a row by its number of occurrences in the batch.
        sparse: has no effect: gradients always contain the used rows only.
        update: how gradients become values, `paceline.update.Adagrad(lr=0.1)` for example.
        consistency: of this table alone, independent of the rest of the model; default as for `Session.table`.
        scale: as for `Session.table`, as all that follow.
        name: name of the table, unique in the job. Default: "embedding", then "embedding-2" and so on, the same on
            all workers that make the layers in the same order. A second layer of the same name and settings, as
            when a notebook runs a cell again, reads and trains the same rows.
        init: first values. Default: normal with deviation 1, as in torch, seeded by the name of the table.
        dtype: dtype of the rows; torch's default dtype if None.
        nonfinite: what happens to a gradient with NaN or infinity.
        cache: keep pulled rows until the consistency requires new ones.
        cache_rows: maximum number of cached rows.
        life: when rows are created and evicted.
        filters: what is dropped or compressed in transit.
        communication: let pushes wait for a bandwidth budget.
        ps: the session. Default: that of `paceline.init()`.

    Raises:
        UsageError: `paceline.init` was not called, or settings are not valid; in forward: ids are not integers.
        IdOutOfRange: an `IndexError`; in forward: an id is not in 0 to `num_embeddings`.

    Shape:
        ids of any shape and integer type, to `(*shape of the ids, embedding_dim)`, where the ids are.

    Example:
        >>> import torch, paceline
        >>> with paceline.connect() as ps:
        ...     users = paceline.Embedding(None, 2, update=paceline.update.SGD(lr=0.5), init=0.0, ps=ps)
        ...     users(torch.tensor([7, -3, 7])).sum().backward()
        ...     _ = ps.clock()
        ...     users(torch.tensor([7, 8])).tolist()
        [[-1.0, -1.0], [0.0, 0.0]]
    """

    @checked
    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        *,
        update: RuleSpec,
        consistency: Consistency | str | None = None,
        scale: Scale | None = None,
        name: str | None = None,
        init: float | First | None = None,
        dtype: torch.dtype | None = None,
        nonfinite: NonFinite = "reject",
        cache: bool | None = None,
        cache_rows: int = 0,
        life: Lifecycle = Lifecycle(),  # noqa: B008 - it is frozen
        filters: Sequence[FilterSpec] = (),
        communication: Managed | None = None,
        ps: Session | None = None,
    ) -> None:
        ps = _session(ps)
        name = ps.tables.default_name("embedding") if name is None else name
        super().__init__(
            ps,
            name,
            num_embeddings,
            embedding_dim,
            padding_idx,
            max_norm,
            init,
            dtype,
            update=update,
            consistency=consistency,
            scale=scale,
            nonfinite=nonfinite,
            cache=cache,
            cache_rows=cache_rows,
            life=life,
            filters=filters,
            communication=communication,
        )
        self.norm_type, self.scale_grad_by_freq, self.sparse = norm_type, scale_grad_by_freq, sparse

    def forward(self, input: Tensor) -> Tensor:
        """Return the rows of these ids; blocks as long as the consistency requires."""
        found = self._lookup.find(input, learn=self._learns)
        return functional.embedding(found.places, found.rows, found.padding, scale_grad_by_freq=self.scale_grad_by_freq)

    def extra_repr(self) -> str:
        """Return the settings that `print` shows."""
        return _described(self._lookup, self.num_embeddings)


class EmbeddingBag(_RowLayer):
    """Sums, means or maxima of rows, used like `torch.nn.EmbeddingBag`; the rows live on the servers and learn there.

    Rows, gradients and clocks are as for `paceline.Embedding`.

    Args:
        num_embeddings: as for `paceline.Embedding`, as all that is not listed here.
        embedding_dim: width of a row.
        max_norm: must be None.
        norm_type: goes with `max_norm`.
        scale_grad_by_freq: divide the gradient of a row by its number of occurrences in the batch; not with mode "max".
        mode: how the rows of a bag are combined: "sum", "mean" or "max".
        sparse: has no effect.
        include_last_offset: offsets end with the number of ids.
        padding_idx: an id that is left out of its bag.

    Shape:
        ids (bags, ids a bag), or (number of ids,) with `offsets` (bags,), to (bags, embedding_dim), where the ids are;
        `per_sample_weights` as the ids, with mode "sum". A bag without ids gives zeros.

    Example:
        >>> import torch, paceline
        >>> with paceline.connect() as ps:
        ...     words = paceline.EmbeddingBag(None, 2, mode="sum", update=paceline.update.Add(), init=1.0, ps=ps)
        ...     words(torch.tensor([5, 6, 7]), torch.tensor([0, 1])).tolist()
        [[1.0, 1.0], [2.0, 2.0]]
    """

    @checked
    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: Mode = "mean",
        sparse: bool = False,
        *,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        update: RuleSpec,
        consistency: Consistency | str | None = None,
        scale: Scale | None = None,
        name: str | None = None,
        init: float | First | None = None,
        dtype: torch.dtype | None = None,
        nonfinite: NonFinite = "reject",
        cache: bool | None = None,
        cache_rows: int = 0,
        life: Lifecycle = Lifecycle(),  # noqa: B008 - it is frozen
        filters: Sequence[FilterSpec] = (),
        communication: Managed | None = None,
        ps: Session | None = None,
    ) -> None:
        ps = _session(ps)
        name = ps.tables.default_name("embedding") if name is None else name
        if mode not in get_args(Mode):
            raise UsageError(f"table '{name}': mode is '{mode}', expected one of {', '.join(get_args(Mode))}.")
        if mode == "max" and scale_grad_by_freq:
            raise UsageError(
                f"table '{name}': scale_grad_by_freq goes with the modes 'sum' and 'mean', not with 'max'."
            )
        super().__init__(
            ps,
            name,
            num_embeddings,
            embedding_dim,
            padding_idx,
            max_norm,
            init,
            dtype,
            update=update,
            consistency=consistency,
            scale=scale,
            nonfinite=nonfinite,
            cache=cache,
            cache_rows=cache_rows,
            life=life,
            filters=filters,
            communication=communication,
        )
        self.norm_type, self.scale_grad_by_freq, self.sparse = norm_type, scale_grad_by_freq, sparse
        self.mode, self.include_last_offset = mode, include_last_offset

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Return the sum, mean or maximum of each bag; blocks as long as the consistency requires."""
        # Not by torch, whose backward on a CPU takes the frequencies of other rows.
        found = self._lookup.find(input, learn=self._learns, by_frequency=self.scale_grad_by_freq)
        try:
            return functional.embedding_bag(
                found.places,
                found.rows,
                offsets,
                mode=self.mode,
                per_sample_weights=per_sample_weights,
                include_last_offset=self.include_last_offset,
                padding_idx=found.padding,
            )
        except (TypeError, AttributeError, ValueError, IndexError, NotImplementedError, RuntimeError) as error:
            if isinstance(error, _OF_A_DEVICE):
                raise
            raise UsageError(
                f"{self}: offsets is {brief(offsets)} and per_sample_weights is {brief(per_sample_weights)} for "
                f"{brief(input)}: {error}."
            ) from error

    def extra_repr(self) -> str:
        """Return the settings that `print` shows."""
        return f"{_described(self._lookup, self.num_embeddings)}, mode='{self.mode}'"


def _asked_by_requires_grad(frame: FrameType | None) -> bool | None:
    """Return the argument of the `Module.requires_grad_` of torch that is on this stack; None if there is none.

    An enclosing module only asks its inner modules for their parameters, so a module without any can only notice here.
    """
    for _ in range(_DEPTH):
        if frame is not None and frame.f_code is nn.Module.requires_grad_.__code__:
            return bool(frame.f_locals["requires_grad"])
        frame = frame.f_back if frame is not None else None
    return None


def _padding(name: str, num: int | None, padding: int | None, max_norm: float | None) -> int | None:
    """Return the id of the padding; raise UsageError for arguments that are not valid, before the table is made."""
    if max_norm is not None:
        raise UsageError(
            f"table '{name}': max_norm is {max_norm}, but a lookup does not change rows on the servers. Leave it out; "
            "to keep rows small use a rule with weight_decay, or one of your own."
        )
    if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance] - scripts are not typed
        raise UsageError(f"an embedding is named {brief(name)}, expected a text that is unique in the job.")
    if not name.isprintable():
        raise UsageError(f"an embedding is named {brief(name)}, which has characters that cannot be printed.")
    for what, number in (("num_embeddings", num), ("padding_idx", padding)):
        if not isinstance(number, int | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(f"table '{name}': {what} is {brief(number)}, expected a whole number or None.")
    if num is not None and num < 1:
        raise UsageError(f"table '{name}': num_embeddings is {num}, expected 1 or more, or None for any ids.")
    if padding is None or num is None:
        return padding
    if not -num <= padding < num:
        raise UsageError(f"table '{name}': padding_idx is {padding}, expected an id below {num}.")
    return padding % num


def _session(ps: Session | None) -> Session:
    """Return the session of a layer; raises UsageError for what is not a session."""
    if not isinstance(ps, Session | None):  # pyright: ignore[reportUnnecessaryIsInstance] - scripts are not typed
        raise UsageError(f"an embedding is given ps={brief(ps)}, expected a session, which paceline.connect() returns.")
    return current() if ps is None else ps


def _dtype(dtype: torch.dtype | None) -> DType:
    if not isinstance(dtype, torch.dtype | str | None):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(
            f"an embedding's dtype is {brief(dtype)}, expected a dtype of torch, torch.float32 for example."
        )
    return cast("DType", dtype_name(dtype or torch.get_default_dtype()))


def _described(lookup: EmbeddingLookup, num: int | None) -> str:
    table = lookup.table
    padding = "" if lookup.padding is None else f", padding_idx={lookup.padding}"
    return f"{num}, {table.width}{padding}, table={shortened(repr(table.name))}, {table.spec.consistency}"
