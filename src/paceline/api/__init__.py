"""What a training script calls: init, connect, tables, collectives, embeddings."""
