"""Training in PyTorch: an ordinary loop whose updates run on the servers.

Other folders use `all_reduce`, `arguments`, `downpour`, `embedding_gradients`, `flat`, `fsdp`, `hooks`, `local_sgd`,
`parameter_server`, `publishing`, `state`, `strategy`.
"""
