"""What a table is, how it is updated, and how one shard of it computes. Tensors in, tensors out: never a socket."""
