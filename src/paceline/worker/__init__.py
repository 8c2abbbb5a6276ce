"""The worker's end: tables, pushes, reads, caches, and the calls to servers."""
