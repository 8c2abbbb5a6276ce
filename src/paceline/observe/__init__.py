"""Observability: the trace of a run, live progress, plots and the report.

Other folders use `notices`, `perfetto`, `plots`, `progress`, `report`, `resources`, `row_counts`, `runs`, `screen`,
`story`, `summary`, `trace`.
"""
