"""Programs on top of the library: plan, advise, tune, compare, demo.

Other folders use `run`, `tune.api`.
"""
