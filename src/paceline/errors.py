"""The errors that Paceline raises, by cause, and the codes with which its processes end.

Mistakes of the caller (`UsageError`), failures of another process (`PeerError`), bugs of Paceline (`ProtocolBug`). A
message says what happened, where (worker, table, clock), what was expected and found, and what to do.

Example:
    >>> import paceline
    >>> try:
    ...     paceline.ssp(-1)
    ... except paceline.errors.UsageError as error:
    ...     print("refused")
    refused
"""

import signal
from typing import Final

# Beside 0 and the codes of scripts; see docs/exit_codes.md.
EXIT_FAILURE: Final = 1
EXIT_USAGE: Final = 2
EXIT_LOST: Final = 75  # no shell and hardly a script ends so: the run has come to its end, without some of its workers
EXIT_NOT_STARTED: Final = 126  # as a shell says it
EXIT_INTERRUPTED: Final = 128 + signal.SIGINT
EXIT_KILLED: Final = 128 + signal.SIGKILL
EXIT_PREEMPTED: Final = 128 + signal.SIGTERM  # of a process that was told to leave, and has

_MOST: Final = 2500  # characters of a message, which may quote what it was given; its end says what to do
_LAST: Final = 600


class PacelineError(Exception):
    """The base of every error below; catch it to catch them all."""

    def __init__(self, *args: object) -> None:
        """Take a message; a long one is cut in its middle."""
        super().__init__(*map(_bounded, args))


def _bounded(text: object) -> object:
    """Return a message without its middle if it is long.

    >>> len(_bounded("x" * 10_000)), len(_bounded("x" * 2_500))
    (2534, 2500)
    """
    if not isinstance(text, str) or len(text) <= _MOST:
        return text
    return f"{text[: _MOST - _LAST]}... [{len(text) - _MOST} characters left out] ...{text[-_LAST:]}"


class UsageError(PacelineError):
    """The caller asked for something that cannot be done: a wrong setting, name, shape or value."""


class IdOutOfRange(UsageError, IndexError):
    """An id is outside the declared range. Also an `IndexError`, as a torch module raises."""


class NoWeight(UsageError, AttributeError):
    """A layer has no `weight`, because its rows live on the servers. Also an `AttributeError`, so `hasattr` works."""


class CheckpointError(PacelineError):
    """What was saved cannot be used: a file is missing, damaged or of another format; the message names it."""


class DataError(PacelineError):
    """Training examples cannot be read: a file is missing, damaged or has changed; the message names it."""


class RecordError(DataError):
    """A record could not be decoded; the message names it and says why."""


class PeerError(PacelineError):
    """Another process failed: it is gone, sent an invalid answer, or refused."""


class ConnectionLost(PeerError):
    """The connection to a peer ended; whether its last message arrived is not known."""


class ServerLost(PeerError):
    """A server is gone, or out of reach for good, and with it its part of the values.

    No call to the servers will succeed any more. What was pulled before can still be read and saved: parameters of a
    model, views and tensors keep their values.
    """


class DeadlineExceeded(PeerError):
    """A wait reached its deadline; the message names what was waited for."""


class AuthenticationFailed(PeerError):
    """A peer could not prove that it belongs to this job."""


class CertificateRefused(AuthenticationFailed):
    """A certificate is not accepted: it is of another authority or job, out of date, or revoked."""


class Refused(PeerError):
    """A server refused a request for good; repeating it will not help."""


class ProtocolBug(PacelineError):
    """A state that must not exist. The message contains the events that led to it; please report all of it."""

    def __init__(self, *args: object) -> None:
        """Take a message of any length."""
        Exception.__init__(self, *args)
