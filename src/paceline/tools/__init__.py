"""Programs on top of the library: plan, tune, compare, demo.

Other folders use `join`, `run`, `tune.api`.
"""
