"""The carriers between the processes of a job, by scheme: a new one is a file of its own and a line here."""

from collections.abc import Mapping
from typing import Final

from paceline.transport import shm, tcp
from paceline.transport.carrier import Carrier

# The names that users choose from are in `job/choices.py`, which the command line reads without loading this.
CARRIERS: Final[Mapping[str, Carrier]] = {
    "shm": shm.CARRIER,
    "tcp": tcp.CARRIER,
}
