"""Servers of their own that stand in for each other: which of them serves a namespace, and which has its replica.

Each has a folder of its own for its state, and all see one other folder, of views:

    VIEWS/lag                             see `lag.py`
    VIEWS/servers/4711                    where the server with this number listens
    VIEWS/namespaces/NAME/server-0.view-3 the third view of a namespace: numbers of its head and its replica

A view is a file that only one process can make, as in the folder of a job (`job/views.py`). So of two servers that
believe the other gone, the first to make the next view has decided; without the folder neither of them serves.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

import msgspec

from paceline.errors import AuthenticationFailed, PacelineError, PeerError, UsageError
from paceline.job.folders import names_in
from paceline.job.views import NO_PROCESS, View, Views
from paceline.launch.limits import explain
from paceline.serve.access import DEFAULT_NAMESPACE
from paceline.serve.lag import agree_on_lag
from paceline.serve.messages import EnterFrame, EnterRequest, NamespaceStanding, encode
from paceline.serve.numbers import SERVERS_NAME, keep_number, own_number
from paceline.serve.standing import ask_standing
from paceline.serve.state import folder_name, write_durably
from paceline.server.replica_lag import ReplicaLag
from paceline.server.replica_link import ReplicaLink
from paceline.server.replica_place import ReplicaPlace
from paceline.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.serve.state import StateFolder
    from paceline.transport.base import Connection, Listener, Transport

_NAMESPACES: Final = "namespaces"
_KEPT_VIEWS: Final = 64
_LOOK_S: Final = 1.0  # between two looks for servers that could have a replica
_FILL_S: Final = 10.0  # between two looks for namespaces that this server alone has, and no client uses
_ASK_TIMEOUT_S: Final = 2.0


class ServedElsewhere(PacelineError):
    """Another server serves the namespace, or has what is newest of it."""

    def __init__(self, text: str, address: str = "") -> None:
        """`address`: where it listens, if that is known."""
        super().__init__(text)
        self.address: Final = address


@final
class NamespaceViews:
    """The views of one namespace, as one server sees and makes them: a `Promotion`. Reads and writes files.

    Args:
        folder: of the views of this namespace; made when it is first written.
        own: number of this server.
    """

    def __init__(self, folder: Path, own: int) -> None:
        self._folder = folder
        self._views = Views(folder, 0)
        self.own: Final = own

    def newest(self) -> View | None:
        """Return the view that counts; None before the first. Raises OSError."""
        return self._views.newest()

    def begin(self) -> None:
        """Make the first view, in which this server is alone, if there is none. Raises OSError."""
        if self.newest() is None:
            self._change(View(1, self.own))

    def take(self, saved: int, is_followed: Callable[[View], bool]) -> View | None:
        """Have this server serve the namespace from its own disk; return the view in which it does, None if it may not.

        Args:
            saved: number of the view in which this server has saved all that was acknowledged; 0 for none.
            is_followed: asks the replica of a view whether it may yet serve, where this server was the head, and ended
                without saving.

        Raises OSError: the folder cannot be used.
        """
        self.begin()
        while (view := self.newest()) is not None:
            if view.head == self.own and view.replica == NO_PROCESS:
                return view
            if view.head == self.own and (saved == view.number or not is_followed(view)):
                wanted = view.alone()
            elif view.replica == self.own and saved == view.number:
                wanted = view.promoted()
            else:
                return None
            if self._change(wanted):
                return wanted
        return None

    def promote(self, number: int) -> bool:
        """See `Promotion.promote`; raises OSError."""
        view = self._views.current(number)
        return view is not None and view.replica == self.own and self._change(view.promoted())

    def dismiss(self, number: int) -> bool:
        """See `Promotion.dismiss`; raises OSError."""
        view = self._views.current(number)
        return view is not None and view.head == self.own and self._change(view.alone())

    def enlist(self, number: int, process: int) -> bool:
        """See `Promotion.enlist`; raises OSError."""
        view = self._views.current(number)
        return view is not None and view.head == self.own and self._change(view.repaired(process))

    def _change(self, view: View) -> bool:
        """Have this view count if it is the first of its number; forget those that were long before it."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Looked at again: one that was stopped in between may have made a view whose number was forgotten.
        if not self._views.change(view) or self.newest() != view:
            return False
        self._views.forget(view.number - _KEPT_VIEWS)
        return True


@final
class PeerTransport:
    """A `Transport` by which the head of a namespace reaches another server, which is to have its replica."""

    def __init__(self, namespace: str, ask: EnterRequest, transport: Transport) -> None:
        self.name: Final = transport.name
        self.maps_memory: Final = False
        self._namespace = namespace
        self._ask = ask
        self._transport = transport

    def allocate(self, size_bytes: int) -> memoryview:
        """Give plain memory; see `Transport.allocate`."""
        return self._transport.allocate(size_bytes)

    def listen(self, address: str) -> Listener:
        """Raise UsageError: it only connects."""
        raise UsageError(f"nothing listens at {address} but `paceline serve`")

    def connect(self, address: str, identity: bytes, *, timeout_s: float) -> Connection:
        """Connect to the replica; see `Transport.connect`."""
        frame = EnterFrame(self._namespace, identity, self._ask)
        return self._transport.connect(address, encode(frame), timeout_s=timeout_s)


class Companion(msgspec.Struct, frozen=True):
    """Another server that lives."""

    number: int
    address: str


@final
class Companions:
    """The other servers that see the same folder. Looks for those that live in a thread, from `start` to `close`.

    Args:
        folder: of views.
        state: folder of this server. What it has of namespaces that are in no view yet is what counts of them.
        address: where this server listens, tcp://HOST:PORT as others reach it.
        transport: makes connections to the others.
        tell: called with a line for the operator, from any thread.
        lag: clocks by which replicas may lag, the same for all that see the folder.
    """

    def __init__(
        self,
        folder: Path,
        state: StateFolder,
        address: str,
        transport: Transport,
        tell: Callable[[str], None],
        lag: int = 0,
    ) -> None:
        """Note where this server listens; raises UsageError as `agree_on_lag`, OSError."""
        agree_on_lag(folder, lag)
        (folder / SERVERS_NAME).mkdir(mode=0o700, exist_ok=True)
        self._folder = folder
        self._transport = transport
        self.state: Final = state
        self.tell: Final = tell
        self.lag: Final = lag
        self._told: dict[int, str] = {}  # why a server cannot be asked, by its number
        self._address = address
        self.own: Final = own_number(state)
        write_durably(folder / SERVERS_NAME / str(self.own), address.encode())
        keep_number(state, self.own)
        for name in state.names():
            self.views(name).begin()
        self._alive: tuple[Companion, ...] = ()
        self._alive_until_s = 0.0
        self._others = self._read_others()
        self._fill: Callable[[tuple[Companion, ...]], bool] = lambda _: False
        self._wanted, self._ending = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="paceline-companions", daemon=True)

    def start(self, fill: Callable[[tuple[Companion, ...]], bool]) -> None:
        """Begin to look for the others; `fill` is called now and then with those that live.

        It returns whether it has begun to give one of them what this server alone has.
        """
        self._fill = fill
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._ending.set()
        self._wanted.set()
        self._thread.join(2 * _ASK_TIMEOUT_S)

    def peer_transport(self, namespace: str, ask: EnterRequest) -> PeerTransport:
        """Return how another server is reached that is to have the replica of a namespace."""
        return PeerTransport(namespace, ask, self._transport)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where all servers listen, this one first, as far as they are known by now."""
        return (self._address, *(other.address for other in self._others))

    def views(self, namespace: str) -> NamespaceViews:
        """Return the views of a namespace."""
        return NamespaceViews(self._folder / _NAMESPACES / folder_name(namespace), self.own)

    def alive(self) -> tuple[Companion, ...]:
        """Return the others that lived a moment ago, and have them looked for again. Does not block."""
        self._wanted.set()
        return self._alive if time.monotonic() < self._alive_until_s else ()

    def address_of(self, number: int) -> str:
        """Return where a server listens; "" where that is not known. Raises OSError."""
        try:
            return (self._folder / SERVERS_NAME / str(number)).read_text()
        except FileNotFoundError:
            return ""

    def standing(self, number: int, namespace: str) -> NamespaceStanding | None:
        """Return what another server has of a namespace; None if it does not answer. Blocks for seconds at most.

        That it has other keys or another token, and will not answer, is told once.
        """
        try:
            address = self.address_of(number)
            return ask_standing(self._transport, address, namespace, _ASK_TIMEOUT_S) if address else None
        except (AuthenticationFailed, UsageError) as error:
            if self._told.get(number) != str(error):
                self.tell(f"this server and another one that sees its --views have no replicas of each other: {error}")
            self._told[number] = str(error)
        except (PeerError, OSError):
            pass
        return None

    def elsewhere(self, namespace: str, view: View) -> ServedElsewhere:
        """Return the error that says which other server has what counts of a namespace."""
        number = view.head if view.head != self.own else view.replica
        address = self.address_of(number)
        where = address.removeprefix("tcp://") or f"no known address (number {number})"
        return ServedElsewhere(
            f"namespace '{namespace}' is with another server, which has what is newest of it: {where}. Start it if it "
            "does not run; if it is lost for good, remove the folder "
            f"{self._folder / _NAMESPACES / folder_name(namespace)}, to go on from what this server has saved",
            address,
        )

    def _look_on(self) -> None:
        fill_s, problem = 0.0, ""
        while not self._ending.is_set():
            self._wanted.wait(_FILL_S)
            self._wanted.clear()
            if self._ending.is_set():
                return
            try:
                self._look()
                if self._alive and time.monotonic() >= fill_s:
                    fill_s = time.monotonic() + (_LOOK_S if self._fill(self._alive) else _FILL_S)
                problem = ""
            except OSError as error:  # tried again
                if problem != str(error):
                    self.tell(f"the folder of --views cannot be used, no namespace gets a replica: {explain(error)}")
                problem = str(error)
            self._ending.wait(_LOOK_S)

    def _look(self) -> None:
        self._others = self._read_others()
        self._alive = tuple(each for each in self._others if self.standing(each.number, DEFAULT_NAMESPACE) is not None)
        self._alive_until_s = time.monotonic() + 2 * _LOOK_S

    def _read_others(self) -> tuple[Companion, ...]:
        numbers = sorted(int(name) for name in names_in(self._folder / SERVERS_NAME) if name.isdecimal())
        return tuple(Companion(number, self.address_of(number)) for number in numbers if number != self.own)


@final
class NamespaceReplicas:
    """What a server has to do with one namespace that other servers may serve, too.

    Args:
        name: of the namespace.
        companions: the other servers.
    """

    def __init__(self, name: str, companions: Companions) -> None:
        self.name: Final = name
        self.views: Final = companions.views(name)
        self._companions = companions
        self._state = companions.state
        self._tell = companions.tell

    def take(self) -> None:
        """Have this server serve the namespace from what it has saved. Blocks for seconds, to ask the replica.

        Raises:
            ServedElsewhere: another server serves it, or may have what this one lacks.
            OSError: the folder of views cannot be used.
        """
        self._require(self.views.take(self._state.saved_view(self.name), self._may_have_more))
        self.forget_saved()

    def go_on(self) -> None:
        """Have this server go on with what a process before this one left in memory; raises as `take`."""
        view = self.views.newest()
        if view is not None and view.head == self.views.own and view.replica != NO_PROCESS:
            self.views.dismiss(view.number)
            view = self.views.newest()
        self._require(view if view is not None and view.head == self.views.own else None)
        self.forget_saved()

    @property
    def is_alone(self) -> bool:
        """Whether this server has what is newest of the namespace, and no other one does. Raises OSError."""
        view = self.views.newest()
        return view is not None and (view.head, view.replica) == (self.views.own, NO_PROCESS)

    def forget_saved(self) -> None:
        """Note that more may be acknowledged from now on than is saved here. Raises OSError."""
        self._state.forget_saved_view(self.name)

    def elsewhere(self) -> ServedElsewhere | None:
        """Return which other server serves the namespace; None if it is for this one to serve. Raises OSError."""
        return self._elsewhere_in(self.views.newest())

    def _elsewhere_in(self, view: View | None) -> ServedElsewhere | None:
        if view is None or view.head == self.views.own:
            return None
        return self._companions.elsewhere(self.name, view)

    def note_saved(self, number: int) -> None:
        """Note that all which was acknowledged in this view is saved here."""
        self._state.note_saved_view(self.name, number)

    def note_saved_as_head(self) -> None:
        """Note that all which this server has acknowledged is saved; another one cannot serve before it knows."""
        try:
            view = self.views.newest()
            if view is not None and view.head == self.views.own:
                self.note_saved(view.number)
        except OSError as error:
            self._tell(
                f"namespace '{self.name}' is saved, but that this is all of it could not be noted: {error}. The other "
                "server has to be there when the namespace is next asked for"
            )

    def standing(self, *, is_served: bool, is_followed: bool) -> NamespaceStanding:
        """Return what this server has of the namespace, which it serves or follows, or neither. Raises OSError."""
        view, saved = self.views.newest(), self._state.saved_view(self.name)
        elsewhere = self._elsewhere_in(view)
        if elsewhere is not None:
            return NamespaceStanding(False, is_followed, saved, elsewhere.address)
        return NamespaceStanding(is_served or not _is_undecided(view, saved), is_followed, saved)

    def is_for_others(self) -> bool:
        """Return whether another server serves the namespace, or may be about to. Raises OSError."""
        view = self.views.newest()
        if view is not None and view.head != self.views.own:
            return True
        return _is_undecided(view, self._state.saved_view(self.name))

    def link(self, generation: int, workers: int | None, beside: Callable[[], bytes]) -> ReplicaLink:
        """Return how the server of the namespace finds its replica, and tells it all."""
        transport = self._companions.peer_transport(self.name, EnterRequest(None, workers, __version__))
        served = f"namespace '{self.name}'"

        def place(number: int, other: Companion) -> ReplicaPlace:
            return ReplicaPlace(
                *(0, number, self.views, lambda: other.address, transport, self._tell, generation, other.number),
                name=served,
                alone=f"{served} has no replica any more, this server goes on alone",
                is_tried_again=True,
            )

        def find() -> list[ReplicaPlace]:
            alive = self._companions.alive()
            view = self.views.newest() if alive else None
            return [] if view is None else [place(view.number + 1, other) for other in alive]

        return ReplicaLink(find=find, beside=beside, replaces=False, lag=ReplicaLag(self.lag) if self.lag else None)

    @property
    def lag(self) -> int:
        """Return by how many clocks of each client the replica may lag."""
        return self._companions.lag

    def _may_have_more(self, view: View) -> bool:
        """Return whether the replica of a view may serve yet, or has saved what this server has not."""
        standing = self._companions.standing(view.replica, self.name)
        return standing is None or standing.follows or standing.saved == view.number

    def _require(self, view: View | None) -> None:
        if view is None:
            newest = self.views.newest()
            if newest is None:  # as on a mount that is gone
                raise OSError(f"there are no views of namespace '{self.name}' any more")
            raise self._companions.elsewhere(self.name, newest)


def _is_undecided(view: View | None, saved: int) -> bool:
    """Return whether the head of a view had a replica as it ended, without having saved all: that one may serve yet.

    Asked of the same view as who is its head: in the next one the replica may be the head, and have none of its own.
    """
    return view is not None and view.replica != NO_PROCESS and saved != view.number
