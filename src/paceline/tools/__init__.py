"""Programs on top of the library: plan, tune, compare, demo."""
