"""Programs on top of the library: plan, tune, compare, demo, reproduce.

Other folders use `run`, `tune.api`.
"""
