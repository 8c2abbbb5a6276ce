"""Starts the processes of a job, watches over them, and leaves none behind."""
