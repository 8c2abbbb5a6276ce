"""Starts the processes of a job by forking one that has imported torch."""

from typing import Final

# What the two ends say to each other, and how long each waits for the other.
READY: Final = b"ready"
GO: Final = b"go"  # asks for a process, and lets one that was forked begin
FORK_TIMEOUT_S: Final = 10.0
