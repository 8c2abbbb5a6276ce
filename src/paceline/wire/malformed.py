"""Exceptions that a malformed request or answer may cause, and their description.

A request runs through many modules, through torch and through the user's own rules. Any failure becomes an answer to
the worker that made the request: a server that ended with it would end for all other workers too.
"""

from collections.abc import Callable
from typing import Final, TypeVar

from paceline.errors import PacelineError, PeerError

T = TypeVar("T")

# The user's own code may raise any exception; `own_code` turns those that would end the process into UsageError.
REQUEST_ERRORS: Final = (Exception,)
_MOST_CHARACTERS: Final = 4000  # the text goes into the header of a frame, and may quote a name as long as one


def describe_broken_table(table: str, server: int, error: BaseException) -> str:
    """Return why a table is closed to pushes and reads: an update failed, and may have changed a part of it."""
    return (
        f"table '{table}' takes no more pushes on server {server} and is not read, as an update of it failed: "
        f"{describe_error(error)}"
    )


def describe_error(error: BaseException) -> str:
    """Return a description of an error, at most 4000 characters long.

    >>> describe_error(ZeroDivisionError("division by zero"))
    'ZeroDivisionError: division by zero'
    """
    text = str(error) if isinstance(error, PacelineError) else f"{type(error).__name__}: {error}"
    text = text.encode(errors="backslashreplace").decode()  # a file's name, for example, may not be valid UTF-8
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS // 2]} ... {text[-500:]}"


def read_answer_of(server: int, what: str, read: Callable[[memoryview], T], body: memoryview) -> T:
    """Return `read(body)`, where `body` is the answer of a server.

    Raises:
        PeerError: `read` failed; the message names the server and `what` was requested.

    Example:
        >>> read_answer_of(0, "its clock", lambda body: int(bytes(body)), memoryview(b"7"))
        7
    """
    try:
        return read(body)
    except REQUEST_ERRORS as error:
        raise PeerError(
            f"server {server} gave an invalid answer of {body.nbytes} bytes when asked for {what}: "
            f"{describe_error(error)}. Do both run the same version?"
        ) from error
