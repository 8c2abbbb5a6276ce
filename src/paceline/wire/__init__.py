"""What travels: messages, their encoding and permissions, connections, send queues.

Other folders use `connection`, `malformed`, `messages`, `requests`, `row_codec`, `send_queue`, `versions`.
"""
