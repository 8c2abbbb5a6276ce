"""Patterns of communication among the workers of a job: who sends what to whom, over process groups of torch."""
