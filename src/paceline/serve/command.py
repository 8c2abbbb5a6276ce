"""`paceline serve`: a server of its own, for clients on this machine and others."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Annotated, Final

from cyclopts import Parameter

from paceline.errors import CheckpointError, UsageError
from paceline.job.carriers import tell_user
from paceline.job.credentials.holders import REVOKED_NAME
from paceline.job.credentials.revocation import watching_revoked
from paceline.job.machines import look_up
from paceline.job.spec import TOKEN_NAME
from paceline.serve.access import SCHEME, format_host_port, parse_host_port, server_access
from paceline.serve.gateway import Gateway, Namespaces
from paceline.serve.namespace import NamespaceConfig
from paceline.serve.state import StateFolder

_ENDING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_ANY_ADDRESS: Final = ("0.0.0.0", "::")


def serve(
    *,
    state: Path,
    listen: str = "127.0.0.1:7700",
    keys: Path | None = None,
    save_every: float = 60.0,
    allow: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    or_previous: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Serve jobs that come and go, and keep their state on disk, until Ctrl-C or SIGTERM.

    Clients connect with paceline.connect("paceline://HOST:PORT/NAME"); each NAME is a job of its own.

    Parameters
    ----------
    state
        Folder of the saved namespaces, and without --keys of the token that clients show. Made if missing.
    listen
        HOST:PORT; port 0 takes a free one. An address that other machines can reach needs --keys.
    keys
        Folder with certificates and a token, as `paceline keys make` writes it.
    save_every
        Seconds between two saves of what has changed; a crash loses no more.
    allow
        Update rules and functions of your own that clients may name, as package.module:Name; others are not run.
    or_previous
        Restore the previous save of a namespace whose newest one is damaged.
    """
    if not save_every > 0:
        raise UsageError(f"--save-every is {save_every:g}, expected more than 0 seconds")
    host, port = parse_host_port(listen)
    with ExitStack() as undo:
        folder = StateFolder(state.absolute())
        undo.callback(folder.close)
        access = server_access(host, folder.path, keys)
        transport = access.transport()
        listener = transport.listen(format_host_port(look_up(host)[0], port))
        undo.callback(listener.close)
        for problem in _damaged(folder, or_previous=or_previous):
            tell_user(problem)
        hosting = NamespaceConfig(
            tell=tell_user, save_every_s=save_every, allowed_paths=frozenset(allow), or_previous=or_previous
        )
        namespaces = Namespaces(folder, transport, hosting)
        undo.enter_context(watching_revoked(keys / REVOKED_NAME if keys else None, namespaces.expel))
        gateway = Gateway(listener, namespaces)
        undo.enter_context(_until_told(gateway.stop))
        print(_greeting(listener.address, folder, keys), flush=True)
        unsaved = gateway.run()
    return 1 if unsaved else 0


def _damaged(folder: StateFolder, *, or_previous: bool) -> list[str]:
    """Read all that was saved; return which namespaces cannot be served and why, so that it is told at the start."""
    problems: list[str] = []
    for name in folder.names():
        try:
            folder.folder(name).newest(or_previous=or_previous)
        except (CheckpointError, OSError) as error:
            problems.append(f"namespace '{name}' is not served, its clients are refused: {error}")
    return problems


def _greeting(address: str, folder: StateFolder, keys: Path | None) -> str:
    where = address.removeprefix("tcp://")
    host, port = parse_host_port(where)
    there = format_host_port(socket.gethostname() if host in _ANY_ADDRESS else host, port)
    names = folder.names()
    found = f"with {', '.join(names)} from {folder.path}" if names else f"with nothing in {folder.path} yet"
    shown = f'token="{folder.path / TOKEN_NAME}"' if keys is None else "keys=FOLDER"
    name = names[0] if names else "NAME"
    return f'paceline: serving at {where} {found}: paceline.connect("{SCHEME}://{there}/{name}", {shown})'


def _until_told(stop: Callable[[], None]) -> ExitStack:
    """Call `stop` at the first signal to end, and let a second one end the process at once; undone on exit."""
    undo = ExitStack()

    def heed(number: int, _frame: FrameType | None) -> None:
        for each in _ENDING:
            signal.signal(each, signal.SIG_DFL)
        print("paceline: saving, and ending", file=sys.stderr, flush=True)
        stop()

    for number in _ENDING:
        before = signal.getsignal(number)
        if before is not signal.SIG_IGN:
            undo.callback(signal.signal, number, before)
            signal.signal(number, heed)
    return undo
