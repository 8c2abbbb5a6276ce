"""Tells what a run did and does: the trace, the numbers drawn from it, live progress, and the report."""
