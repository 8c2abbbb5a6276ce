"""Collective operations among the workers of a job, over process groups of torch."""
