"""Keeps a module at the newest version: fetches beside the forward passes, and swaps weights between two of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping
from inspect import currentframe
from operator import index
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, final

import msgspec
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paceline.core.calls import checked_late, listed
from paceline.errors import DeadlineExceeded, PeerError, UsageError
from paceline.notices import tell
from paceline.torch_private import uncompiled
from paceline.transport.deadline import patience_s
from paceline.wire.malformed import REQUEST_ERRORS, describe_error

if TYPE_CHECKING:
    from paceline.versions.subscription import Version, VersionSubscription

_WAIT_S: Final = 30.0  # for one version, before it is waited for again
_DUE_WAIT_S: Final = 1.0  # the same while one is here that is not swapped in
_FORWARD_TIMEOUT_S: Final = 30.0  # for forward passes of other threads
_LOOK_S: Final = 0.1  # between two looks at whether these have ended
_CLOSING_TIMEOUT_S: Final = 30.0


class _Offer(msgspec.Struct, frozen=True):
    """A version for the module: each of its tensors with new values."""

    number: int
    pairs: list[tuple[Tensor, Tensor]]


@final
class ForwardGate:
    """Knows the forward passes of a module that run, of all threads, and swaps its weights while there is none.

    A forward that begins while a swap is due waits for those that run, so that a swap is not put off for ever; if they
    last very long it begins with the weights that they have. One inside another, of the same thread, is a part of it.

    A forward that anything but an `Exception` ends, as Ctrl-C does, does not come to `leave`: torch calls no hook then.
    So the gate has the frames that forward passes run in, and one whose frame has ended is over.

    Attributes:
        number: of the version that the module has; below 0 before the first.
        num_swaps: how many versions it has been given.
        changed: guards all this, and is notified when a version is swapped in.
    """

    def __init__(self) -> None:
        self.number = -1
        self.num_swaps = 0
        self.changed: Final = threading.Condition()
        self._running: dict[int, list[FrameType]] = {}  # by thread: of its forward passes, the innermost last
        self._due: _Offer | None = None

    def __reduce__(self) -> tuple[type[ForwardGate], tuple[()]]:
        """Give a copy of the module, or one that is loaded, a gate that is offered nothing."""
        return ForwardGate, ()

    @property
    def problem(self) -> str:
        """Why the version that was offered last is not in the module; empty if it is."""
        with self.changed:
            if self._due is None:
                return ""
            return f"version {self._due.number} is here, and is swapped in when no forward pass runs any more"

    def offer(self, number: int, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Have each tensor of a module get new values, in place of those offered before that it has not taken."""
        with self.changed:
            self._due = _Offer(number, pairs)
            self.settle()

    def settle(self) -> bool:
        """Swap in what is due unless a forward pass runs; return whether nothing is due any more."""
        with self.changed:
            if self._due is not None and not self._is_running():
                self._swap(self._due)
            return self._due is None

    def enter(self, *_: object) -> None:
        """Begin a forward pass, which the caller's frame runs, with the newest weights that are here."""
        with self.changed:
            # Here and not before: torch.compile stops at the lock, and warns of what it cannot trace.
            thread, frame = threading.get_ident(), _calling(currentframe())
            until_s = time.monotonic() + _FORWARD_TIMEOUT_S
            while not self._forwards_of(thread) and not self.settle():
                rest_s = until_s - time.monotonic()
                if rest_s <= 0:
                    break
                self.changed.wait(min(rest_s, _LOOK_S))  # no forward that is interrupted wakes it
            self._running.setdefault(thread, []).append(frame)

    def leave(self, *_: object) -> None:
        """End the forward pass that the caller's frame runs, or whose frame has ended."""
        with self.changed:
            thread, frame = threading.get_ident(), _calling(currentframe())
            forwards = self._forwards_of(thread)
            if forwards and forwards[-1] is frame:  # else a hook before ours has failed, or its frame has ended
                forwards.pop()
            if not forwards:
                self._running.pop(thread, None)
                self.settle()

    def _forwards_of(self, thread: int) -> list[FrameType]:
        """Return the frames of a thread's forward passes that run; one around another ends after it."""
        forwards = self._running.get(thread, [])
        while forwards and _has_ended(forwards[-1]):
            forwards.pop()
        return forwards

    def _is_running(self) -> bool:
        self._running = {thread: forwards for thread in [*self._running] if (forwards := self._forwards_of(thread))}
        return bool(self._running)

    def _swap(self, due: _Offer) -> None:
        for tensor, values in due.pairs:
            tensor.data = values
        self._due, self.number = None, due.number  # not before: one that Ctrl-C ends is done again
        self.num_swaps += 1
        self.changed.notify_all()


def _calling(frame: FrameType | None) -> FrameType:
    """Return the frame that called the one of a function."""
    caller = None if frame is None else frame.f_back
    assert caller is not None, "CPython has frames, and hooks are called"
    return caller


def _has_ended(frame: FrameType) -> bool:
    """Return whether a frame has ended, also one of another thread; its variables are let go of then."""
    try:
        frame.clear()
    except RuntimeError:  # it is being executed
        return False
    return True


@final
class ModuleUpdates:
    """Updates of a module, from `VersionSubscription.into`, until it is closed. A context manager.

    Attributes:
        number: of the version whose weights the module has.
        num_swaps: how many versions the module has been given, the first one included.
        problem: why the newest version is not in the module; empty while all is well.
    """

    def __init__(self, module: nn.Module, subscription: VersionSubscription, timeout_s: float) -> None:
        """Give the module the newest version; blocks for it."""
        self._module = module
        self._subscription = subscription
        self._gate: Final = ForwardGate()
        self._problem = ""  # of the newest version, which is not here
        self._closing = threading.Event()
        self._handles = list[RemovableHandle]()
        self._thread = threading.Thread(target=self._follow, name="paceline-versions", daemon=True)
        try:
            self._give(subscription.latest(timeout_s=timeout_s))
            self._handles.append(module.register_forward_pre_hook(self._gate.enter))
            self._handles.append(module.register_forward_hook(self._gate.leave, always_call=True))
            self._thread.start()
        except BaseException:
            subscription.close()
            self._remove_hooks()
            raise

    @property
    def number(self) -> int:
        """The version whose weights the module has."""
        return self._gate.number

    @property
    def num_swaps(self) -> int:
        """How many versions the module has been given, the first one included."""
        return self._gate.num_swaps

    @property
    def problem(self) -> str:
        """Why the newest version is not in the module; empty while all is well."""
        return self._problem or self._gate.problem

    def __repr__(self) -> str:
        return f"ModuleUpdates(version {self.number}, {self.num_swaps} swaps)"

    def __enter__(self) -> Self:
        """Return this object."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """End the updates."""
        self.close()

    @checked_late
    def wait(self, number: int, *, timeout_s: float = 60.0) -> int:
        """Wait until the module has version `number` or a newer one, and return which; raises DeadlineExceeded."""
        number, timeout_s = index(number), patience_s(timeout_s)
        with self._gate.changed:
            if not self._gate.changed.wait_for(lambda: self.number >= number or self._closing.is_set(), timeout_s):
                why = self.problem or self._subscription.problem
                raise DeadlineExceeded(
                    f"waited {timeout_s:g} s for version {number} of '{self._subscription.name}' in the module, which "
                    f"has {self.number}{f': {why}' if why else ''}"
                )
        return self.number

    def close(self) -> None:
        """End the updates; the module keeps its weights. Idempotent."""
        self._closing.set()
        self._subscription.close()
        with self._gate.changed:
            self._gate.changed.notify_all()
        self._thread.join(_CLOSING_TIMEOUT_S)
        self._remove_hooks()

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _follow(self) -> None:
        """Fetch each newer version, and offer it to the module; ends at `close`."""
        while not self._closing.is_set():
            wait_s = _WAIT_S if self._gate.settle() else _DUE_WAIT_S
            try:
                self._give(self._subscription.wait(timeout_s=wait_s))
            except DeadlineExceeded:
                continue
            except PeerError as error:
                self._note(str(error))
                self._closing.wait(1.0)
            except REQUEST_ERRORS as error:  # also where memory is short: a thread that ended would tell nothing
                if not self._closing.is_set():
                    self._note(describe_error(error))
                    self._closing.wait(_WAIT_S)

    def _note(self, problem: str) -> None:
        """Tell once why the module does not get the newest version: it goes on with what it has."""
        if problem != self._problem:
            self._problem = problem
            tell(f"the module stays at version {self.number} of '{self._subscription.name}': {problem}")

    def _give(self, version: Version) -> None:
        """Offer a version to the module, whose bytes are all here; raises UsageError if it does not fit."""
        with version:
            pairs = pairs_of(uncompiled(self._module), version, version.absent)
            self._problem = ""
            self._gate.offer(version.number, pairs)


def pairs_of(
    module: nn.Module, version: Mapping[str, Tensor], kept: Collection[str] = ()
) -> list[tuple[Tensor, Tensor]]:
    """Return each tensor of a module with its values, on its device and of its dtype; those that are `kept` need none.

    Raises:
        UsageError: the names of the parameters are not those of the version, or a tensor has another shape, or no
            memory.
    """
    parameters = dict(module.named_parameters())
    own: dict[str, Any] = {**dict(module.named_buffers()), **parameters}
    absent = [name for name in parameters if name not in version and name not in kept]
    others = [name for name in own if name in version and own[name].shape != version[name].shape]
    strange = [name for name in version if name not in own.keys() | module.state_dict().keys()]
    empty = [name for name, tensor in own.items() if tensor.is_meta]
    for names, what in (
        (absent, "it has no"),
        (strange, "the module has no"),
        (others, "the shapes differ of"),
        (empty, "the module is on device meta, where there are no values, with"),
    ):
        if names:
            raise UsageError(
                f"the version does not fit the module: {what} {listed(names)}. Publish the model that this module is "
                "a copy of, or give `into` the part of it that was published."
            )
    return [
        (tensor, version[name].to(device=tensor.device, dtype=tensor.dtype))
        for name, tensor in own.items()
        if name in version
    ]
