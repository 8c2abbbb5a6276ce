"""The connection of `paceline join` to a run: finds the run, asks for places, and hears what to do with workers."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, final

import msgspec

from paceline.errors import EXIT_PREEMPTED, AuthenticationFailed, DeadlineExceeded, PeerError, Refused, UsageError
from paceline.job.credentials.holders import KEYS_NAME, Holder, TokenFiles, link_keys, tls_settings
from paceline.job.folders import check_folder
from paceline.job.machines import format_host_port, look_up, parse_host_port
from paceline.launch.joining.messages import (
    ADDRESS_NAME,
    JOB,
    LIMITS,
    SEND_TIMEOUT_S,
    JoinAccepted,
    JoinRefused,
    JoinRequest,
    WorkerExited,
    WorkerOrder,
    WorkerTrace,
    decode_from_run,
    encode,
)
from paceline.launch.places import read_elastic
from paceline.transport.base import Connection
from paceline.transport.tcp import TcpTransport

CONNECT_TIMEOUT_S: Final = 10.0
ANSWER_TIMEOUT_S: Final = 200.0  # a run that begins answers once its servers listen
_TURN_S: Final = 60.0
_END_TIMEOUT_S: Final = 5.0


class RunAddress(msgspec.Struct, frozen=True):
    """A run to join: its name in messages, its addresses, and the folder with the token and keys to show there.

    Args:
        name: what it is called in messages.
        addresses: to try in turn.
        folder: of the run on this machine, or of this process.
        is_here: whether `folder` is that of the run.
        holder: of the certificate to show; None without any.
        ranks: of the workers that there are certificates for; None for any.
    """

    name: str
    addresses: tuple[str, ...]
    folder: Path
    is_here: bool
    holder: Holder | None
    ranks: tuple[int, ...] | None = None

    def transport(self) -> TcpTransport:
        """Return the carrier to it; raises UsageError for a token or certificates that cannot be used."""
        tls = None if self.holder is None else tls_settings(self.folder / KEYS_NAME, self.holder)
        return TcpTransport(TokenFiles(self.folder, JOB), LIMITS, tls=tls)


def find_run_address(text: str, num: int, keys: Path | None, own: Path) -> RunAddress:
    """Find the run that is meant by a folder, or by HOST:PORT, with keys that are linked from the folder `own`.

    Raises:
        UsageError: there is no such run, its workers do not come and go, or keys are missing or not needed.
    """
    folder = Path(text).absolute()  # workers read there, wherever their script goes
    if not folder.is_dir():
        return _find_elsewhere(text, keys, own)
    if keys is not None:
        raise UsageError(f"{text} is the folder of a run on this machine, which has its keys: leave out --keys")
    spec = read_elastic(folder, num)
    check_folder(folder)
    try:
        address = (folder / ADDRESS_NAME).read_text()
    except OSError as error:
        raise UsageError(f"the run in {folder} does not listen for workers that join: has it ended?") from error
    return RunAddress(f"the run in {text}", (address,), folder, True, Holder("any") if spec.encrypted else None)


def _find_elsewhere(text: str, keys: Path | None, own: Path) -> RunAddress:
    try:
        host, port = parse_host_port(text)
    except UsageError as error:
        raise UsageError(
            f"{text!r} is neither the folder of a run on this machine nor HOST:PORT, where a run on another one "
            "listens: the run says when it begins how workers join it"
        ) from error
    if keys is None:
        raise UsageError(
            f"{text} may be on another machine, which lets in who has a certificate of its authority: give --keys "
            "FOLDER, as `paceline keys issue` writes it; a run on this machine is joined by its folder"
        )
    link_keys(keys, own)
    ranks = tuple(sorted(Holder.parse(path.stem).rank for path in keys.glob("worker-*.pem")))
    has_any = (keys / f"{Holder('any')}.pem").exists()
    if not ranks and not has_any:
        raise UsageError(
            f"{keys} has no certificate for a worker: have one made where the keys were made, `paceline keys issue "
            "KEYS worker-2 --out FOLDER`, or `any` in place of worker-2"
        )
    holder = Holder("any") if has_any else Holder("worker", ranks[0])
    addresses = tuple(f"tcp://{format_host_port(address, port)}" for address in look_up(host))
    return RunAddress(f"the run at {text}", addresses, own, False, holder, None if has_any else ranks)


@final
class RunConnection:
    """The connection to a run of one `paceline join`. A context manager: leaving it ends the connection.

    Raises:
        AuthenticationFailed: the token or the certificate is not one that holds there.
        PeerError: no run is there.
    """

    def __init__(self, run: RunAddress) -> None:
        """Connect to the run that is there."""
        self._run = run
        self._connection = _connect(run)
        self._given: set[int] = set()  # ranks of places whose end was not reported
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._orders: deque[WorkerOrder] = deque()
        self._lost = ""

    def __enter__(self) -> RunConnection:
        """Return this connection."""
        return self

    def __exit__(self, *error: object) -> None:
        """End it; places in which nothing was started are left."""
        for rank in tuple(self._given):
            self.report(rank, EXIT_PREEMPTED)
        self._connection.close()
        if self._thread is not None:
            self._thread.join(_END_TIMEOUT_S)

    @property
    def lost(self) -> str:
        """Why the run is out of reach; empty while it is not."""
        with self._lock:
            return self._lost

    def ask(self, request: JoinRequest) -> JoinAccepted:
        """Ask for places, and return the answer; blocks until the servers of the run listen.

        Raises:
            Refused: there are none, with the reason.
            PeerError: the run has ended, or does not answer in time.
        """
        try:
            self._connection.send(encode(request), timeout_s=SEND_TIMEOUT_S)
            answer = decode_from_run(self._connection.receive(timeout_s=ANSWER_TIMEOUT_S).header)
        except DeadlineExceeded as error:
            raise DeadlineExceeded(
                f"{self._run.name} has not answered within {ANSWER_TIMEOUT_S:g} s: do its servers not start? Look at "
                "what `paceline run` wrote"
            ) from error
        except PeerError as error:
            raise type(error)(f"{self._run.name} has ended before it answered: {error}") from error
        if isinstance(answer, JoinRefused):
            raise Refused(f"{self._run.name} takes no worker: {answer.reason}")
        if not isinstance(answer, JoinAccepted) or len(answer.places) != request.num:
            raise PeerError(f"{self._run.name} said {type(answer).__name__}, expected {request.num} places")
        self._given = {rank for rank, _ in answer.places}
        return answer

    def follow(self, wake: Callable[[], None]) -> None:
        """Listen to the run from now on; `wake` is called by another thread when `orders` or `lost` have news."""
        self._thread = threading.Thread(target=self._receive_all, args=(wake,), name="paceline-run", daemon=True)
        self._thread.start()

    def orders(self) -> list[WorkerOrder]:
        """Return what has been ordered since the last call; does not block."""
        with self._lock:
            orders = list(self._orders)
            self._orders.clear()
        return orders

    def report(self, rank: int, exit_code: int) -> None:
        """Tell the run how a worker has ended; a run that is gone does not hear it."""
        self._given.discard(rank)
        with suppress(PeerError):
            self._connection.send(encode(WorkerExited(rank, exit_code)), timeout_s=SEND_TIMEOUT_S)

    def send_trace(self, said: WorkerTrace) -> None:
        """Send what a worker has written down; a run that is gone does not get it."""
        with suppress(PeerError):
            self._connection.send(encode(said), timeout_s=SEND_TIMEOUT_S)

    def _receive_all(self, wake: Callable[[], None]) -> None:
        try:
            while True:
                self._receive()
                wake()
        except PeerError as error:
            with self._lock:
                self._lost = str(error)
            wake()

    def _receive(self) -> None:
        try:
            message = decode_from_run(self._connection.receive(timeout_s=_TURN_S).header)
        except DeadlineExceeded:
            return
        if not isinstance(message, WorkerOrder):
            raise PeerError(f"it said {type(message).__name__} when that means nothing")
        with self._lock:
            self._orders.append(message)


def _connect(run: RunAddress) -> Connection:
    """Connect to the first address that leads to the run; raises what went wrong at the last one, with advice."""
    transport, problem = run.transport(), PeerError(f"{run.name} has no address")
    for address in run.addresses:
        try:
            return transport.connect(address, b"", timeout_s=CONNECT_TIMEOUT_S)
        except AuthenticationFailed as error:
            advice = (
                "Join with the keys that the run was given as --keys, or with some that `paceline keys issue` has made "
                "of them"
            )
            raise type(error)(f"{run.name} does not let this process in: {error}. {advice}") from error
        except PeerError as error:
            problem = error
    where = "" if run.is_here else ", does its --listen name an address that leads there from here"
    raise type(problem)(f"cannot reach {run.name}: {problem}. Does the run go on{where}?") from problem
