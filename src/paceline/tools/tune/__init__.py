"""Hyperparameter search: many runs of a script, the worst of which are stopped early."""
