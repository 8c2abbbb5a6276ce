"""Programs on top of the library: plan, advise, tune, compare, demo, reproduce.

Other folders use `join`, `run`, `tune.api`.
"""
