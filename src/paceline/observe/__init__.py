"""Observability: the trace of a run, live progress, plots and the report.

Other folders use `averages`, `dashboard.watch`, `equality`, `export.feed`, `export.options`, `export.prometheus`,
`export.run_metrics`, `export.trackers`, `perfetto`, `plots`, `progress`, `report`, `resources`, `row_counts`, `runs`,
`screen`, `story`, `summary`, `text_tables`, `trace`, `traffic`.
"""
