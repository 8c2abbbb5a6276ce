"""The standalone server: it outlives its jobs, keeps their state on disk, and is reached by address.

`paceline serve` is one process with one listening address. Every job is a namespace, the path of the address: a server
node in a thread of its own, with its own tables, clocks and workers. The gateway assigns each client a rank, and hands
its connection over to the node of its namespace.
"""
