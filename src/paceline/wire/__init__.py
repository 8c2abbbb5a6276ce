"""What travels: messages, their encoding and permissions, connections, send queues.

Other folders use `connection`, `deltas`, `malformed`, `messages`, `requests`, `row_codec`, `send_queue`, `versions`.
"""
