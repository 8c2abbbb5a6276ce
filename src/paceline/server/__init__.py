"""A parameter server: one thread that performs what the core decides, on the tables that it holds."""
