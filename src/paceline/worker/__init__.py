"""A worker's end of the parameter server: tables, pushes, reads, caches and the calls to servers."""
