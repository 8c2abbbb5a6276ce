"""Row tables on the servers: stores of rows by id, their update rules and their lifecycle."""
