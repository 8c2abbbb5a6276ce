"""A server of its own: it outlives the jobs that it serves, keeps their state on disk, and takes clients by address.

`paceline serve` is one process with one listening address. Every job is a namespace, the path of the address: a server
node in a thread of its own, with tables, clocks and members of its own. At the reception clients are told which worker
they are; what they say from then on goes to the node of their namespace.
"""
