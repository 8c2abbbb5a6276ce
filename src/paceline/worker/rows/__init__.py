"""The worker's end of row tables: reads, pushes, the cache of rows, the throttle."""
