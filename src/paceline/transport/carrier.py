"""What a transport declares so that jobs can use it between their processes."""

from collections.abc import Callable

import msgspec

from paceline.transport.base import Secret, Transport
from paceline.transport.tls import TlsSettings


class JobSettings(msgspec.Struct, frozen=True):
    """What a carrier may need to know about its job. `secret` and `tls` raise UsageError when a file is not there.

    Args:
        job: the name of the job.
        folder: of the job, the same for all of its processes on this machine.
        secret: returns the secret of the job.
        tls: returns the certificate files of this process, None if the job is not encrypted.
        notice: told what works less well than it could, and which clients are turned away.
    """

    job: str
    folder: str
    secret: Callable[[], Secret]
    tls: Callable[[], TlsSettings | None]
    notice: Callable[[str], None]


class Carrier(msgspec.Struct, frozen=True):
    """How the processes of a job use one transport.

    Args:
        make: returns the transport of one process.
        free_address: returns an address to listen at, given the host, the job's folder and a name such as "server-0".
    """

    make: Callable[[JobSettings], Transport]
    free_address: Callable[[str, str, str], str]
