"""Where samples come from, and how batches are made of them."""
