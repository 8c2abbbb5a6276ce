"""A model as flat vectors: its parameters packed and unpacked, its weights as values of a table, its gradients to push.

`Weights` follow their table, as copies of its values or views of the memory of servers. `Gradients` lie in the send
buffer of the next push, so that backward writes straight into the message.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import accumulate, pairwise
from weakref import WeakMethod, ref

import msgspec
import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.utils.hooks import RemovableHandle, unserializable_hook

from paceline.errors import UsageError
from paceline.torch_private import version_of
from paceline.training.device_copies import DeviceCopies
from paceline.training.hooks import call_if_alive
from paceline.update.dtypes import dtype_name, torch_dtype
from paceline.update.table import TABLE_DTYPES, DType, Segment, position_hint, positional_name
from paceline.worker.cache import Readable, TableCache
from paceline.worker.table import Table

# Of tensors that can lie in a table.
_DTYPES: dict[torch.dtype, DType] = {torch_dtype(name): name for name in TABLE_DTYPES}


@dataclass(frozen=True, slots=True)
class FlatParameters:
    """Tensors laid end to end: (elements of all,), on the CPU, of their common dtype or a wider one.

    Example:
        >>> weights = FlatParameters.over({"weight": torch.ones(2, 2), "bias": torch.zeros(2)})
        >>> flat = weights.empty()
        >>> weights.pack_values(flat)
        >>> flat
        tensor([1., 1., 1., 1., 0., 0.])
    """

    named: Mapping[str, Tensor]
    dtype: DType
    tensors: tuple[Tensor, ...] = field(init=False)  # in order
    # Where each tensor lies in a flat vector: its first element, and one past its last.
    bounds: tuple[tuple[int, int], ...] = field(init=False)

    def __post_init__(self) -> None:
        """Lay out the tensors; their number of elements does not change later."""
        object.__setattr__(self, "tensors", tuple(self.named.values()))
        edges = accumulate((tensor.numel() for tensor in self.tensors), initial=0)
        object.__setattr__(self, "bounds", tuple(pairwise(edges)))

    @staticmethod
    def over(named: Mapping[str, Tensor]) -> FlatParameters:
        """Lay tensors end to end, in this order.

        Raises:
            UsageError: they have no common floating-point dtype.
        """
        first_of: dict[torch.dtype, str] = {}
        for name, tensor in named.items():
            first_of.setdefault(tensor.dtype, name)
        if len(first_of) != 1 or not first_of.keys() <= _DTYPES.keys():
            found = ", ".join(f"{dtype_name(dtype)} ('{name}')" for dtype, name in first_of.items())
            raise UsageError(
                f"the tensors of one table have the dtypes {found or 'of nothing: there are none'}; expected one of "
                f"{', '.join(_DTYPES.values())} for all. {_advice(first_of)}"
            )
        return FlatParameters(named, _DTYPES[first_of.popitem()[0]])

    @staticmethod
    def widened(named: Mapping[str, Tensor]) -> FlatParameters:
        """Lay tensors of one or several of the dtypes of tables end to end, in one that holds the values of all.

        Example:
            >>> FlatParameters.widened({"mean": torch.zeros(2), "scale": torch.ones(1, dtype=torch.bfloat16)}).dtype
            'float32'
        """
        return FlatParameters(named, _DTYPES[reduce(torch.promote_types, (one.dtype for one in named.values()))])

    @staticmethod
    def takes(tensor: Tensor) -> bool:
        """Return whether the dtype of a tensor is one of tables."""
        return tensor.dtype in _DTYPES

    @property
    def numel(self) -> int:
        """Number of elements of all tensors."""
        return sum(tensor.numel() for tensor in self.tensors)

    def empty(self) -> Tensor:
        """Return an uninitialised flat vector."""
        return torch.empty(self.numel, dtype=torch_dtype(self.dtype), device="cpu")

    def pack_values(self, out: Tensor) -> None:
        """Copy the tensors into a flat vector."""
        for tensor, part in self._pairs(out):
            part.copy_(tensor.detach())

    def unpack(self, flat: Tensor) -> None:
        """Copy a flat vector into the tensors."""
        with torch.no_grad():
            for tensor, part in self._pairs(flat):
                tensor.copy_(part)

    def parts(self, flat: Tensor) -> list[Tensor]:
        """Return the view of a flat vector that belongs to each tensor, in its shape."""
        return [
            flat[start:stop].view(tensor.shape) for (start, stop), tensor in zip(self.bounds, self.tensors, strict=True)
        ]

    def _pairs(self, flat: Tensor) -> zip[tuple[Tensor, Tensor]]:
        return zip(self.tensors, self.parts(flat), strict=True)


def laid_out_like(parameter: Tensor, values: Tensor) -> Tensor:
    """Return values in the memory layout of a parameter of their shape, which torch's fused steps take for granted.

    >>> parameter = torch.zeros(1, 2, 3, 3).to(memory_format=torch.channels_last)
    >>> laid_out_like(parameter, torch.ones(1, 2, 3, 3)).stride()
    (18, 1, 6, 2)
    """
    if values.shape != parameter.shape or values.stride() == parameter.stride():
        return values
    return torch.empty_like(parameter, dtype=values.dtype, device=values.device).copy_(values)


def _advice(first_of: Mapping[torch.dtype, str]) -> str:
    """Return what to do about these dtypes, and where the name of a parameter comes from if it is a position."""
    advice = "Convert the model, or make one optimizer for each dtype."
    if not first_of.keys() <= _DTYPES.keys():
        advice = "Convert what has another one, or leave it out of the optimizer."
    if any(dtype.is_complex for dtype in first_of):
        advice = (
            "For complex numbers make the parameter of their real and imaginary parts, torch.view_as_real(values), and "
            "compute with torch.view_as_complex(parameter)."
        )
    return advice + "".join(position_hint(name) for name in list(first_of.values())[:1])


def segments_of(
    optimizer: torch.optim.Optimizer, model: nn.Module | None
) -> tuple[dict[str, Tensor], tuple[Segment, ...]]:
    """Return the parameters of an optimizer in order, by what they are called, and the segments they become.

    A parameter has the name it has in the model, or else the one that the optimizer was given.
    """
    names = {parameter: name for name, parameter in model.named_parameters()} if model is not None else {}
    named: dict[str, Tensor] = {}
    segments: list[Segment] = []
    for group_index, group in enumerate(optimizer.param_groups):
        given = group.get("param_names", ())
        for index, parameter in enumerate(group["params"]):
            own = given[index] if index < len(given) else positional_name(group_index, index)
            name = names.get(parameter, own)
            if name in named:
                raise UsageError(f"the optimizer has two parameters of the name '{name}': give each its own.")
            named[name] = parameter
            segments.append(Segment(name, tuple(parameter.shape), group_index))
    return named, tuple(segments)


_ALIGNMENT_BYTES = 64  # of torch's own tensors; kernels on others are slower, and may round differently


@dataclass(slots=True, weakref_slot=True, eq=False)
class Weights:
    """Tensors that are set to the values of a table, again and again.

    Where the worker's cache of the table is live shared memory, a tensor becomes a view of it, if its values are
    contiguous and aligned there and no other tensor shared the tensor's storage. Then a fetch copies nothing. Writes of
    a script to a tensor are lost with the next fetch, view or not. When this object is dropped, the tensors and all
    that shares memory with them keep their values.

    Attributes:
        is_watched: whether changes to tensors that are no views are noticed, too; not where steps or forward make them.
        changed: the name of a tensor that the script had changed before the last fetch, as far as that shows; else "".
    """

    flat: FlatParameters
    table: Table
    device_copies: DeviceCopies = field(default_factory=DeviceCopies)
    others: Collection[int] = ()  # addresses of storages that other tensors have, which follow these
    is_watched: bool = False
    changed: str = ""
    # Tensors that were made views, by index, with the address of each: a script may have replaced its memory since.
    _viewing: dict[int, int] = field(default_factory=dict[int, int])
    _places: tuple[int, ...] = ()
    _values: Readable | None = None  # of the last fetch
    _slices: dict[int, Tensor] = field(default_factory=dict[int, Tensor])  # of these, for tensors that are copies
    # Torch's version of each view, or of each tensor, after the last fetch, which counts changes in place.
    _versions: dict[int, int] = field(default_factory=dict[int, int])
    # Of tensors that are watched and no views: how they begin, for what torch does not count; in the first fetches.
    _beginnings: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    _num_fetches: int = 0
    _viewed: TableCache | None = None  # the cache whose memory tensors view, or have viewed
    # Whether a script has written to views since the last fetch; set by `check_views`.
    _written: bool | None = None
    _are_sent: bool = False  # what a script has written is in the table
    _set_aside: list[Tensor] | None = None  # what the tensors are outside of `newest`, while that has replaced it
    _are_on_device: bool = field(init=False)

    def __post_init__(self) -> None:
        """Look where the tensors are."""
        self._are_on_device = any(map(self.device_copies.serves, self.flat.tensors))

    def __del__(self) -> None:
        """Stop changing tensors that live longer than this object."""
        self.detach()

    @property
    def are_views(self) -> bool:
        """Return whether some of the tensors are views of the servers' memory."""
        return bool(self._viewing)

    def fetch(self, *, refresh: bool) -> None:
        """Set the tensors to the values of the table; blocks until these are fresh enough."""
        self.table.read(self.set_from, refresh=refresh)

    def check_views(self) -> None:
        """Check for writes of a script to views while there is time; the script does not run until the next fetch."""
        # Without the lock, so that answers of servers are handled meanwhile.
        self._written = self._was_written(self.table.client.cache)

    def _was_written(self, cache: TableCache) -> bool:
        """Return whether a script has written to views: torch counts most changes, the kernel shows the rest."""
        tensors = self.flat.tensors
        for index, version in self._versions.items():
            if version_of(tensors[index]) != version:
                self._note_changed(index)
                return True
        for index, known in self._beginnings.items():
            if not _begins_with(tensors[index], known):
                self._note_changed(index)
                break
        if not cache.was_written(list(self._viewing.values())):
            return False
        for index, address in self._viewing.items():
            if cache.shows_writes(address, tensors[index].nbytes):
                self._note_changed(index)
                break
        return True

    def _note_changed(self, index: int) -> None:
        """Note that a script has changed a tensor, unless the table has what it has written."""
        self.changed = "" if self._are_sent else list(self.flat.named)[index]

    def note_sent(self) -> None:
        """Note that the table has what the tensors are: until the next fetch they may differ from the last one."""
        self._are_sent = True

    @contextmanager
    def newest(self) -> Generator[None]:
        """Set the tensors to the newest values for the length of a `with` block, and then back.

        The values contain every update of all clocks below the worker's own, or without a staleness bound all that have
        arrived. Blocks until they are there.
        """
        tensors = self.flat.tensors
        newest: list[Tensor] = []
        written: dict[int, Tensor] = {}

        def take(cache: TableCache) -> None:
            if cache.was_written_anywhere():
                written.update({index: tensors[index].data.clone() for index in self._views()})
                cache.reread()
            values = cache.readable()
            for tensor, (start, stop) in zip(tensors, self.flat.bounds, strict=True):
                newest.append(torch.empty_like(tensor).copy_(values.slice(start, stop).view(tensor.shape)))

        self.table.read(take, exact=self.table.consistency.bound is not None)
        held = [tensor.data for tensor in tensors]
        before, self._set_aside = self._set_aside, self._set_aside or held
        for tensor, data in zip(tensors, newest, strict=True):
            tensor.data = data
        try:
            yield
        finally:
            self._set_aside = before
            for tensor, data in zip(tensors, held, strict=True):
                tensor.data = data
            for index, data in written.items():
                tensors[index].data.copy_(data)

    def pack_own(self, out: Tensor) -> None:
        """Copy the tensors into a flat vector, inside `newest` too as they are outside of it."""
        own = [tensor.data for tensor in self.flat.tensors] if self._set_aside is None else self._set_aside
        for tensor, part in zip(own, self.flat.parts(out), strict=True):
            part.copy_(tensor)

    def hold(self) -> None:
        """Replace views by copies until the next fetch, so that writes of servers do not show before."""
        tensors = self.flat.tensors
        for index in self._views():
            tensors[index].data = tensors[index].data.clone()
            del self._viewing[index]

    def detach(self) -> None:
        """Replace views by private memory: no other process changes the tensors from now on."""
        viewed, self._viewed = self._viewed, None
        if viewed is not None:  # without the node's lock, because the garbage collector may call this anywhere
            viewed.keep()
        self._viewing.clear()
        self._slices.clear()
        self._places, self._values = (), None

    def _views(self) -> list[int]:
        """Return the indices of the tensors that are views now."""
        tensors = self.flat.tensors
        return [index for index, address in self._viewing.items() if tensors[index].data_ptr() == address]

    def set_from(self, cache: TableCache) -> None:
        """Set the tensors to the values in a cache of their table."""
        if self._written or (self._written is None and self._was_written(cache)):
            cache.reread()
        self._written = None
        if self._are_on_device and cache.memory is not None:
            self.device_copies.lock(cache, cache.memory)
        values, tensors = cache.readable(), self.flat.tensors
        if values is not self._values:
            places = values.places
            if places != self._places:
                self._viewing.clear()
            self._values, self._places = values, places
            self._slices.clear()
        for index, address in list(self._viewing.items()):
            if tensors[index].data_ptr() != address:  # the script has given it other memory
                del self._viewing[index]
                if _is_plain(tensors[index], self.flat.dtype):  # else it has been converted, and not changed
                    self._note_changed(index)
        if len(self._viewing) < len(tensors):
            self._fill_others(cache, values)
        if self._viewing:
            self._viewed = cache
            increment_version([tensors[index] for index in self._viewing])  # tells autograd of the change
        known = range(len(tensors)) if self.is_watched and not self._are_on_device else self._viewing
        self._versions, self._are_sent = {index: version_of(tensors[index]) for index in known}, False
        if self._beginnings or self._num_fetches < _NUM_SAMPLED_FETCHES:
            self._note_beginnings(known)
        for reading in self.device_copies.queued() if self._are_on_device else ():
            cache.note_device_read(reading)

    def _note_beginnings(self, watched: Iterable[int]) -> None:
        """Keep how tensors that are no views begin; in the first fetches, which show what is done at each step."""
        self._beginnings = {}
        if self._num_fetches < _NUM_SAMPLED_FETCHES:
            self._num_fetches += 1
            tensors = self.flat.tensors
            copies = [index for index in watched if index not in self._viewing and tensors[index].is_contiguous()]
            self._beginnings = {index: _beginning(tensors[index]).clone() for index in copies}

    @torch.no_grad()
    def _fill_others(self, cache: TableCache, values: Readable) -> None:
        """Set the tensors that are not views."""
        for index, (tensor, (start, stop)) in enumerate(zip(self.flat.tensors, self.flat.bounds, strict=True)):
            if index in self._viewing:
                continue
            known = self._slices.get(index)
            if known is not None and known.shape == tensor.shape:
                tensor.copy_(known)
                continue
            live = cache.live and values.lie_together(start, stop)
            own = values.slice(start, stop)
            self._fill(index, tensor, own, live=live)
            if live and own.data_ptr() % _ALIGNMENT_BYTES:  # it never becomes a view, and lies there for long
                self._slices[index] = own.view(tensor.shape)

    def _fill(self, index: int, tensor: Tensor, values: Tensor, *, live: bool) -> None:
        """Copy values into a tensor, or make it a view of them."""
        if live and _can_view(tensor, values) and not self._has_followers(tensor):
            tensor.data = _alone(values).view(tensor.shape)
            self._viewing[index] = values.data_ptr()
        elif self._are_on_device and self.device_copies.serves(tensor):
            self.device_copies.deliver(values.view(tensor.shape), tensor)
        else:
            tensor.copy_(values.view(tensor.shape))

    def _has_followers(self, tensor: Tensor) -> bool:
        return bool(self.others) and tensor.untyped_storage().data_ptr() in self.others


def _can_view(tensor: Tensor, values: Tensor) -> bool:
    """Return whether a tensor may become a view of these live values: it must be alone in its current storage."""
    return (
        values.data_ptr() % _ALIGNMENT_BYTES == 0  # first, as it is cheap and often decides
        and tensor.device.type == "cpu"
        and tensor.dtype == values.dtype
        and tensor.is_contiguous()
        and tensor.untyped_storage().nbytes() == tensor.nbytes
        and not tensor.is_shared()
    )


def _alone(values: Tensor) -> Tensor:
    """Return the same memory as a storage of its own, so that saving the tensor saves nothing around it."""
    if not values.numel():
        return values.new_empty(0)
    return torch.frombuffer(values.view(torch.uint8).numpy(), dtype=values.dtype)


def _is_plain(tensor: Tensor, dtype: DType) -> bool:
    """Return whether a tensor is as those of a model are made, of this dtype."""
    made_so = tensor.dtype == torch_dtype(dtype) and tensor.is_contiguous()
    return made_so and tensor.device.type == "cpu" and not tensor.is_shared()


DENSE = "sparse=False, or as paceline.Embedding, whose rows live on the servers."


def sparse_gradient(name: str) -> UsageError:
    """Return the error for a parameter whose gradient is sparse."""
    return UsageError(f"parameter '{name}' has a sparse gradient: build its layer with {DENSE}")


_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element; compared as bits, NaN equals itself
_STRETCH = 4096  # elements
_NUM_SAMPLED = 16  # elements of a tensor
_NUM_SAMPLED_FETCHES = 8


def _beginning(tensor: Tensor) -> Tensor:
    """Return the bits of the first elements of a tensor as it lies in memory."""
    return tensor.detach().view(-1)[:_NUM_SAMPLED].view(_BITS[tensor.itemsize])


def _begins_with(tensor: Tensor, known: Tensor) -> bool:
    """Return whether a tensor begins with these bits; True for one that lies otherwise now."""
    is_like = tensor.is_contiguous() and tensor.device == known.device and tensor.itemsize == known.itemsize
    return not is_like or torch.equal(_beginning(tensor), known)


class GradientVersion(msgspec.Struct, frozen=True, eq=False):
    """Gradient and its torch version, which counts changes in place."""

    gradient: Tensor | None
    version: int

    @staticmethod
    def of(gradient: Tensor | None) -> GradientVersion:
        """Record a gradient and its current version."""
        return GradientVersion(gradient, -1 if gradient is None else version_of(gradient))


class _Copy(msgspec.Struct, frozen=True, eq=False):
    """Copy of a gradient from its device, complete at `done`; holds the gradient so that its address is not reused."""

    gradient: Tensor
    place: int
    version: int
    done: torch.cuda.Event

    def is_of(self, gradient: Tensor) -> bool:
        """Return whether this copies a gradient in its current version."""
        return gradient is self.gradient and (gradient.data_ptr(), version_of(gradient)) == (self.place, self.version)


@dataclass(slots=True, weakref_slot=True)
class Gradients:
    """Collects the gradients of the tensors of a flat vector in a send buffer.

    With `in_place`, a gradient that backward has just computed is moved there at once, and `grad` becomes a view of it,
    so that `collect` has nothing to copy. Use it only for memory that no other process reads during backward. A
    gradient that a script has assigned to `grad` is copied by `collect` instead, and one that a script keeps does not
    change with the next backward.

    Gradients on devices are copied by `device_copies`; `fetch` starts a copy during backward.
    """

    flat: FlatParameters
    in_place: bool
    device_copies: DeviceCopies = field(default_factory=DeviceCopies)
    # Whether some gradients are on devices, so that `collect` waits for their computation.
    are_on_device: bool = field(init=False)
    # (num elements,), and the view of it for each tensor, in the tensor's shape.
    _buffer: Tensor | None = None
    _place: int = 0  # the address of its storage
    _parts: list[Tensor] = field(default_factory=list[Tensor])
    # Tensors without a gradient when backward last reached them: the one it leaves there has no other owner.
    _without: set[int] = field(default_factory=set[int])
    # Views that became `grad`, by the index of their tensor, while they are referenced.
    _given: dict[int, ref[Tensor]] = field(default_factory=dict[int, ref[Tensor]])
    # Copies from devices that are under way, by the index of their tensor.
    _coming: dict[int, _Copy] = field(default_factory=dict[int, _Copy])
    _handles: list[RemovableHandle] = field(default_factory=list[RemovableHandle])
    _turn: int = 0  # number of calls of `changed`, which selects the stretch of each gradient to compare

    def __post_init__(self) -> None:
        """Register autograd hooks around each gradient, for the lifetime of this object."""
        self.are_on_device = any(map(self.device_copies.serves, self.flat.named.values()))
        if not self.in_place:
            return
        note, move = WeakMethod(self._note_absence), WeakMethod(self._move)
        for index, tensor in enumerate(self.flat.named.values()):
            if tensor.requires_grad and tensor.device.type == "cpu" and not self.device_copies.serves(tensor):
                self._handles.append(tensor.register_hook(_before(note, index, ref(tensor))))
                self._handles.append(tensor.register_post_accumulate_grad_hook(partial(call_if_alive, move, index)))

    def detach(self) -> None:
        """Leave gradients where backward makes them, from the next backward on."""
        while self._handles:
            self._handles.pop().remove()

    def attach(self, buffer: Tensor) -> None:
        """Collect into `buffer` from now on; its content is overwritten."""
        if self._buffer is None or buffer.data_ptr() != self._buffer.data_ptr():
            self._parts = self.flat.parts(buffer)
            self._place = buffer.untyped_storage().data_ptr()
        self._buffer = buffer

    def collect(self) -> tuple[int, ...]:
        """Complete the buffer; return the indices of the tensors without a gradient, which are zeros there.

        Blocks until devices have computed and copied theirs.

        Raises:
            UsageError: a gradient is sparse.
        """
        absent: list[int] = []
        for index, (name, tensor) in enumerate(self.flat.named.items()):
            gradient = tensor.grad
            if gradient is None:
                self._vacate(index)
                self._parts[index].zero_()
                absent.append(index)
            elif gradient.layout != torch.strided:
                raise sparse_gradient(name)
            elif self.are_on_device and self.device_copies.serves(gradient):
                self._begin(index, gradient)
            elif gradient.data_ptr() != self._parts[index].data_ptr() or not gradient.is_contiguous():
                self._write(index, gradient)
        while self._coming:
            self._coming.popitem()[1].done.synchronize()
        return tuple(absent)

    def found(self) -> tuple[GradientVersion, ...]:
        """Return the gradients in their current versions, for `changed`."""
        return tuple(GradientVersion.of(tensor.grad) for tensor in self.flat.named.values())

    def changed(self, found: tuple[GradientVersion, ...]) -> str:
        """Return the name of a tensor whose gradient has changed since `found`; empty if none has.

        Changes that torch does not count (through `.data`, for example) are looked for in one stretch of each gradient,
        another one in every call.
        """
        self._turn += 1
        for (name, tensor), before, part in zip(self.flat.named.items(), found, self._parts, strict=True):
            now = GradientVersion.of(tensor.grad)
            if now.gradient is not before.gradient or now.version != before.version:
                return name
            if now.gradient is not None and not _is_copied(now.gradient, part, self._turn):
                return name
        return ""

    def fetch(self, index: int) -> None:
        """Start to copy a gradient from its device, if that does not block.

        `collect` copies it again if torch counts a change since, which it does not for changes through `.data` and by
        `GradScaler.unscale_`. So call this only for gradients that stay as backward leaves them.
        """
        gradient = list(self.flat.named.values())[index].grad
        if gradient is None or gradient.layout != torch.strided or not self.device_copies.serves(gradient):
            return
        if self.device_copies.can_hide(self._parts[index]):
            self._begin(index, gradient)

    def _begin(self, index: int, gradient: Tensor) -> None:
        """Start to copy a gradient from its device, unless that copy is under way."""
        coming = self._coming.get(index)
        if coming is None or not coming.is_of(gradient):
            place, version = gradient.data_ptr(), version_of(gradient)
            done = self.device_copies.fetch(gradient.detach(), self._parts[index])
            self._coming[index] = _Copy(gradient, place, version, done)

    def _note_absence(self, index: int, tensor: Tensor) -> None:
        """Record whether a tensor has a gradient that backward is about to add to."""
        if tensor.grad is None:
            self._without.add(index)
        else:
            self._without.discard(index)

    def _move(self, index: int, tensor: Tensor) -> None:
        """Move a gradient that backward has just made, unless it belongs to a graph or is not contiguous."""
        gradient = tensor.grad
        if gradient is None or index not in self._without or not self._parts or not self._fits(index, gradient):
            return
        self._write(index, gradient)
        given = self._parts[index].data  # for autograd not a view, and without history
        tensor.grad = given
        self._given[index] = ref(given)

    def _fits(self, index: int, gradient: Tensor) -> bool:
        part = self._parts[index]
        plain = gradient.layout == torch.strided and not gradient.requires_grad and gradient.is_contiguous()
        return plain and gradient.dtype == part.dtype and gradient.device == part.device

    def _write(self, index: int, gradient: Tensor) -> None:
        """Copy a gradient into its part of the buffer."""
        if index in self._coming or index in self._given:
            self._vacate(index)
        part, source = self._parts[index], gradient.detach()
        if source.device == part.device and source.untyped_storage().data_ptr() == self._place:
            source = source.clone()  # it may overlap its own part
        part.copy_(source)

    def _vacate(self, index: int) -> None:
        """Prepare a part to be overwritten: wait for a copy into it, and move out a gradient that the script keeps."""
        coming = self._coming.pop(index, None)
        if coming is not None:
            coming.done.synchronize()
        given = self._given.pop(index, _no_tensor)()
        if given is not None:
            given.data = given.data.clone()


def _is_copied(gradient: Tensor, part: Tensor, turn: int) -> bool:
    """Return whether a stretch of a gradient equals its copy to the bit; True for layouts that are not compared."""
    if not gradient.is_contiguous() or gradient.dtype != part.dtype or gradient.device != part.device:
        return True
    start = turn * _STRETCH % max(part.numel(), 1)
    ours, theirs = (
        tensor.detach().view(-1)[start : start + _STRETCH].view(_BITS[part.itemsize]) for tensor in (gradient, part)
    )
    return torch.equal(ours, theirs)


def _no_tensor() -> None:
    """Stand for a dead weak reference."""


def _before(
    note: WeakMethod[Callable[[int, Tensor], None]], index: int, tensor: ref[Tensor]
) -> Callable[[Tensor], None]:
    """Return a hook that autograd calls before it adds to a gradient; it keeps no object alive."""

    @unserializable_hook
    def on_gradient(_: Tensor) -> None:
        act, about = note(), tensor()
        if act is not None and about is not None:
            act(index, about)

    return on_gradient
