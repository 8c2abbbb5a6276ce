"""Row tables between a worker and the servers: what travels, what a worker keeps, how a server answers."""
