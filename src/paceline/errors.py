"""Every error Paceline raises on purpose, by whose mistake it is.

Yours (`UsageError`), theirs (`PeerError`), ours (`ProtocolBug`). A message says what happened, where (worker,
table, clock), what was expected and what was found, and what to do about it.
"""


class PacelineError(Exception):
    """The base of every error below; catch it to catch them all."""


class UsageError(PacelineError):
    """You asked for something that cannot be done: a wrong setting, name, shape or value."""


class IdOutOfRange(UsageError, IndexError):
    """An id is none of those that were declared. An `IndexError` too, as a torch module raises."""


class NoWeight(UsageError, AttributeError):
    """A layer has no `weight`, as its rows live on the servers. An `AttributeError` too, so that `hasattr` says so."""


class CheckpointError(PacelineError):
    """What was saved cannot be used: a file is missing, damaged or of another format; the message names it."""


class DataError(PacelineError):
    """Training examples cannot be read: a file is missing, damaged or has changed; the message names it."""


class RecordError(DataError):
    """A record could not be decoded; the message names it and says why."""


class PeerError(PacelineError):
    """Another process failed us: it went away, answered nonsense, or refused."""


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
    """A state that must not exist. The message carries the story that led to it; please report it whole."""
