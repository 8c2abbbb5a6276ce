"""Starts the processes of a job, supervises them, and leaves none behind."""
