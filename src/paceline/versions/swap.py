"""Keeps a module at the newest version: fetches beside the forward passes, and swaps weights between two of them."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, final

from torch import Tensor, nn

from paceline.core.calls import checked_late
from paceline.errors import DeadlineExceeded, PeerError, UsageError
from paceline.notices import tell
from paceline.transport.deadline import patience_s
from paceline.wire.malformed import REQUEST_ERRORS, describe_error

if TYPE_CHECKING:
    from paceline.versions.subscription import Version, VersionSubscription

_SHOWN: Final = 3  # names in a message
_WAIT_S: Final = 30.0  # for one version, before it is waited for again
_FORWARD_TIMEOUT_S: Final = 30.0  # for forward passes of other threads
_CLOSING_TIMEOUT_S: Final = 30.0


@final
class ForwardGate:
    """Counts the forward passes of a module that run, of all threads, and calls `swap` while there is none.

    A forward that begins while a swap is due waits for those that run, so that a swap is not put off for ever; if they
    last very long it begins with the weights that they have. One inside another, of the same thread, is a part of it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_running = 0
        self._depth = threading.local()
        self._due: list[tuple[Tensor, Tensor]] = []

    def offer(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Have each tensor of a module get new values, in place of those offered before that it has not taken."""
        with self._changed:
            self._due = pairs
            if not self._num_running:
                self._swap()

    def enter(self, *_: object) -> None:
        """Begin a forward pass, with the newest weights that are here."""
        depth: int = getattr(self._depth, "value", 0)
        self._depth.value = depth + 1
        if depth:
            return
        with self._changed:
            may_swap = self._changed.wait_for(lambda: not (self._due and self._num_running), _FORWARD_TIMEOUT_S)
            if may_swap and not self._num_running:
                self._swap()
            self._num_running += 1

    def leave(self, *_: object) -> None:
        """End a forward pass."""
        depth: int = getattr(self._depth, "value", 0)
        if not depth:  # a hook before ours has failed
            return
        self._depth.value = depth - 1
        if depth > 1:
            return
        with self._changed:
            self._num_running -= 1
            if not self._num_running:
                self._swap()
                self._changed.notify_all()

    def _swap(self) -> None:
        pairs, self._due = self._due, []
        for tensor, values in pairs:
            tensor.data = values


@final
class ModuleUpdates:
    """Updates of a module, from `VersionSubscription.into`, until it is closed. A context manager.

    Attributes:
        number: of the version whose weights the next forward pass has.
        num_swaps: how many versions the module has been given, the first one included.
        problem: why the newest version is not in the module; empty while all is well.
    """

    def __init__(self, module: nn.Module, subscription: VersionSubscription, timeout_s: float) -> None:
        """Give the module the newest version; blocks for it."""
        self.number = -1
        self.num_swaps = 0
        self.problem = ""
        self._module = module
        self._subscription = subscription
        self._gate: Final = ForwardGate()
        self._changed = threading.Condition()
        self._closing = threading.Event()
        try:
            self._give(subscription.latest(timeout_s=timeout_s))
        except BaseException:
            subscription.close()
            raise
        self._handles = (
            module.register_forward_pre_hook(self._gate.enter),
            module.register_forward_hook(self._gate.leave, always_call=True),
        )
        self._thread = threading.Thread(target=self._follow, name="paceline-versions", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"ModuleUpdates(version {self.number}, {self.num_swaps} swaps)"

    def __enter__(self) -> Self:
        """Return this object."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """End the updates."""
        self.close()

    @checked_late
    def wait(self, number: int, *, timeout_s: float) -> int:
        """Wait until the module has version `number` or a newer one, and return which; raises DeadlineExceeded."""
        timeout_s = patience_s(timeout_s)
        with self._changed:
            if not self._changed.wait_for(lambda: self.number >= number or self._closing.is_set(), timeout_s):
                raise DeadlineExceeded(
                    f"waited {timeout_s:g} s for version {number} of '{self._subscription.name}' in the module, which "
                    f"has {self.number}. {self.problem}"
                )
        return self.number

    def close(self) -> None:
        """End the updates; the module keeps its weights. Idempotent."""
        self._closing.set()
        self._subscription.close()
        with self._changed:
            self._changed.notify_all()
        self._thread.join(_CLOSING_TIMEOUT_S)
        for handle in self._handles:
            handle.remove()

    def _follow(self) -> None:
        """Fetch each newer version, and offer it to the module; ends at `close`."""
        while not self._closing.is_set():
            try:
                self._give(self._subscription.wait(timeout_s=_WAIT_S))
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
        if problem != self.problem:
            self.problem = problem
            tell(f"the module stays at version {self.number} of '{self._subscription.name}': {problem}")

    def _give(self, version: Version) -> None:
        """Offer a version to the module, whose bytes are all here; raises UsageError if it does not fit."""
        with version:
            pairs = pairs_of(self._module, version, version.absent)
            self._gate.offer(pairs)
        with self._changed:
            self.number, self.problem = version.number, ""
            self.num_swaps += 1
            self._changed.notify_all()


def pairs_of(
    module: nn.Module, version: Mapping[str, Tensor], kept: Collection[str] = ()
) -> list[tuple[Tensor, Tensor]]:
    """Return each tensor of a module with its values, on its device and of its dtype; those that are `kept` need none.

    Raises:
        UsageError: a parameter is not in the version, or a tensor has another shape.
    """
    parameters = dict(module.named_parameters())
    own: dict[str, Any] = {**dict(module.named_buffers()), **parameters}
    absent = [name for name in parameters if name not in version and name not in kept]
    others = [name for name in own if name in version and own[name].shape != version[name].shape]
    if absent or others:
        what = f"it has no {_listed(absent)}" if absent else f"the shapes differ of {_listed(others)}"
        raise UsageError(
            f"the version does not fit the module: {what}. Publish the model that this module is a copy of, or "
            "give `into` the part of it that was published."
        )
    return [
        (tensor, version[name].to(device=tensor.device, dtype=tensor.dtype))
        for name, tensor in own.items()
        if name in version
    ]


def _listed(names: list[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN} others" if len(names) > _SHOWN else shown
