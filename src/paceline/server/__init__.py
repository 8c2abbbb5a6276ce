"""A parameter server: a thread that performs what the core decides on its tables.

Other folders use `connections`, `cuts`, `embedded`, `feeds`, `journal`, `node`, `readers`, `record`,
`record_follower`, `recovery`, `replica`, `replica_lag`, `replica_place`, `served_table`, `tables`, `versions`,
`work_queue`.
"""
