"""Training in PyTorch: an ordinary loop whose updates run on the servers."""
