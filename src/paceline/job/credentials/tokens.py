"""The token of a job as its files say, which may change while the job runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, final

from paceline.job.spec import TOKEN_NAME, read_token
from paceline.transport.file_watch import FileWatch

PREVIOUS_NAME: Final = "token.previous"  # holds until it is removed


@final
class TokenFiles:
    """The secret of a job (see `transport.base.Secret`), read again when it has changed: rotating it ends nothing.

    While there is a file `token.previous`, that one holds for others as well.

    Raises UsageError when there is no token.
    """

    def __init__(self, folder: Path, job: str) -> None:
        self.job: Final = job
        self._tokens = FileWatch((folder / TOKEN_NAME, folder / PREVIOUS_NAME), lambda: _read(folder))
        self._tokens.get()

    def tokens(self) -> Sequence[bytes]:
        """Return the token, and the previous one if it still holds."""
        return self._tokens.get()


def _read(folder: Path) -> Sequence[bytes]:
    """Read both; the previous one first, because rotating writes it first."""
    previous = (read_token(folder, PREVIOUS_NAME),) if (folder / PREVIOUS_NAME).exists() else ()
    return (read_token(folder), *previous)
