"""Reading training examples and making batches of them, in the process of the loop or in data servers."""
