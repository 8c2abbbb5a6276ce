"""Search over hyperparameters: many runs of a script, some at the same time, and which of them is best."""
