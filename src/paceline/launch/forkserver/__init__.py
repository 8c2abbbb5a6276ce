"""Starts the processes of a job by forking one that has imported torch."""
