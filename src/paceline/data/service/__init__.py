"""Data servers: batches made by processes of their own and sent to workers."""
