"""Starts the processes of a job by forking one that has imported torch."""

from typing import Final

# What the two ends say to each other, and how long each waits for the other.
READY: Final = b"ready"
FORK: Final = b"fork"
REQUEST_BYTES_MAX: Final = 1024 * 1024  # more than a socket takes as one message
FORK_TIMEOUT_S: Final = 10.0
