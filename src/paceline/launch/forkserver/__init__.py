"""Starts the processes of a job by forking one that has imported torch."""

from typing import Final

# What the two ends say to each other, and how long each waits for the other.
READY: Final = b"ready"
FORK: Final = b"fork"  # asks for a process
GO: Final = b"go"  # comes with a file that says what a forked one is to become
FORK_TIMEOUT_S: Final = 10.0
