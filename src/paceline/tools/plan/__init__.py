"""Planner: what fits on which devices, and how long a step takes, before anything runs."""
