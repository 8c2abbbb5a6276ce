"""The demonstration: one classifier under four consistency models, and a report that compares them."""
