"""A parameter server: a thread that performs what the core decides on its tables.

Other folders use `connections`, `cuts`, `embedded`, `feeds`, `journal`, `node`, `readers`, `record_file`,
`record_follower`, `recovery`, `replay`, `replica`, `replica_lag`, `replica_link`, `replica_messages`, `replica_place`,
`served_table`, `tables`, `versions`.
"""
