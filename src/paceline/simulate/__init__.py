"""The simulator: the same cores as the real nodes, on virtual time, with seeded delays, stragglers and faults."""
