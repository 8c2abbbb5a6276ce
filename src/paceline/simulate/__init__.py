"""The simulator: the real cores on virtual time, with seeded delays and faults.

Other folders use `history`, `outcome`, `scenario`, `world`.
"""
