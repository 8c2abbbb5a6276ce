"""What code may raise that is given numbers, names or tensors that make no sense, and how that is told.

What a worker asks for is carried out by many parts, by torch and by rules of the user's own. Whatever of it goes wrong
is an answer to that worker: a server that ended with it would end for all others too.
"""

from typing import Final

from paceline.errors import PacelineError

# Code of the user's own may raise an exception of its own kind; what would end the process `own_code` makes one.
MISHAPS: Final = (Exception,)
_MOST_CHARACTERS: Final = 4000  # a story goes into the header of a frame, and what it quotes may be as long as one


def broken_story(table: str, server: int, error: BaseException) -> str:
    """Say why a table can be neither pushed to nor read: an update failed, and may have changed a part of it."""
    return (
        f"table '{table}' takes no more pushes on server {server} and is not read, as an update of it failed: "
        f"{story(error)}"
    )


def story(error: BaseException) -> str:
    """Say what went wrong, at bearable length.

    >>> story(ZeroDivisionError("division by zero"))
    'ZeroDivisionError: division by zero'
    """
    text = str(error) if isinstance(error, PacelineError) else f"{type(error).__name__}: {error}"
    text = text.encode(errors="backslashreplace").decode()  # a name of a file, for example, may be none that travels
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS // 2]} ... {text[-500:]}"
