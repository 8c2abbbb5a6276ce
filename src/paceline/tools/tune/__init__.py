"""Search over hyperparameters: many runs of a script, and which of them goes on."""
