"""What a training script calls: init, connect, tables, collectives, embeddings.

Other folders use `collectives`, `connect`, `embedding`, `feed`, `programs`, `publishing`, `script`, `session`.
"""
