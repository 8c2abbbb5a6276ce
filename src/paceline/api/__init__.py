"""What a training script calls: init, connect, rank, tables, collectives, embeddings, and how a process joins a job."""
