"""What a run reports, for programs that people have already: trackers of experiments, and Prometheus."""
