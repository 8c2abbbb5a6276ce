"""Observability: the trace of a run, live progress, plots and the report."""
