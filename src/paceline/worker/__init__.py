"""The worker's end: tables, pushes, reads, caches, and the calls to servers.

Other folders use `cache`, `cuts`, `declaration`, `metrics`, `named_tensors`, `node`, `parts`, `publishing`, `pushes`,
`rows.managed`, `rows.state`, `rows.table`, `rpc`, `table`, `table_opener`, `validation`, `waits`.
"""
