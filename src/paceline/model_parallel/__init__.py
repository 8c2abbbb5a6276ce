"""One model held by several workers: pipeline stages, split layers, sharded parameters."""
