"""The demonstration: one classifier under four consistency models and all-reduce, and a report that compares them."""
