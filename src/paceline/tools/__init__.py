"""Programs on top of the library: plan, advise, tune, compare, demo.
"""Programs on top of the library: plan, tune, compare, demo, reproduce.

Other folders use `join`, `run`, `tune.api`.
"""
