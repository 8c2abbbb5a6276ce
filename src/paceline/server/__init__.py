"""A parameter server: a thread that performs what the core decides on its tables."""
