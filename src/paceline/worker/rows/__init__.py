"""A worker's end of row tables: which rows are read and pushed, the cache of rows, and the throttle."""
