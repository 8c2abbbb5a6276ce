"""The wire between workers and servers: messages, their encoding and permissions, connections, send queues."""
