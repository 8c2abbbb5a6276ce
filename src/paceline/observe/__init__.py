"""Observability of a run: traces, summaries, live progress and reports."""
