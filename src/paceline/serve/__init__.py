"""Long-lived servers: they outlive jobs, keep state on disk, take clients by address.

`paceline serve` is one process with one listening address. Every job is a namespace, the path of the address: a server
node in a thread of its own, with tables, clocks and members of its own. The gateway tells each client which worker it
is and hands its connection to the node of its namespace.

Other folders use `access`, `client`, `messages`, `namespace`.
"""
