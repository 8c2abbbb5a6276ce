"""The nodes: the only place where the core, the tensors and a transport meet threads and a real clock."""
