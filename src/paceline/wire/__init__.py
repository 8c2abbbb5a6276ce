"""What travels: messages, their encoding and permissions, connections, send queues."""
