"""Collectives among the workers of a job: in shared memory on one machine, else over Gloo."""
