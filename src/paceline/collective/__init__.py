"""Collectives among the workers of a job: in shared memory, its transport, or Gloo.

Other folders use `call_queue`, `collectives`, `failures`, `group`, `meeting`, `operations`, `process_group`,
`signature`, `torch_backend`.
"""
