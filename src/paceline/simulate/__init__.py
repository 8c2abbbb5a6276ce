"""Simulator: the cores of the real nodes on virtual time, with seeded delays, stragglers and faults."""
