"""The number of a server that stands in for others, which it keeps in its own folder, and by which they find it.

STATE/server            the number
VIEWS/servers/4711      where the server with this number listens
"""

from __future__ import annotations

import secrets
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from paceline.errors import UsageError
from paceline.serve.state import write_durably

if TYPE_CHECKING:
    from paceline.serve.state import StateFolder

SERVERS_NAME: Final = "servers"
_NUMBER_NAME: Final = "server"
_MOST_SERVERS: Final = 1 << 31


def own_number(state: StateFolder) -> int:
    """Return the number of the server with this folder, a new one before `keep_number`.

    Raises OSError, UsageError for another text.
    """
    file = state.path / _NUMBER_NAME
    with suppress(FileNotFoundError):
        text = file.read_text()
        if not text.isdecimal() or not 0 <= int(text) < _MOST_SERVERS:
            raise UsageError(f"{file} says {text[:80]!r}, expected the number of this server: was it changed?")
        return int(text)
    return secrets.randbelow(_MOST_SERVERS)


def keep_number(state: StateFolder, number: int) -> None:
    """Have the server with this folder keep its number, once others find it by that. Raises OSError."""
    file = state.path / _NUMBER_NAME
    if not file.exists():
        write_durably(file, str(number).encode())


def require_same_views(state: Path, views: Path | None) -> None:
    """Raise UsageError where the server of a folder has stood in for others, and these see another folder of views.

    It would serve what it has saved, though another one may have acknowledged more since. Raises OSError.
    """
    file = state / _NUMBER_NAME
    if not file.exists() or (views is not None and (views / SERVERS_NAME / file.read_text()).exists()):
        return
    found = "there is no --views now." if views is None else f"{views} does not list it: is that folder mounted?"
    raise UsageError(
        f"the server of {state} stands in for others, as {file} says, and {found} Another one may have what is newest "
        f"of its namespaces: give --views as before. To serve what is saved here, without the others, remove {file}"
    )
