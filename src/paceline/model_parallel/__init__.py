"""One model over several workers: pipeline stages, split layers, sharded parameters."""
