"""Programs on top of the library: plan, advise, tune, compare, demo.

Other folders use `join`, `run`, `tune.api`.
"""
