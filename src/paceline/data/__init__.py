"""Data of a job: sharding of sources, loaders and data servers."""
