"""Sources of samples, and the batches made from them."""
