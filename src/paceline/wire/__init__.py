"""What travels between workers and servers: messages, their encoding and senders, connections, send queues."""
