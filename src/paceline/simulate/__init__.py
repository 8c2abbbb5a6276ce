"""The simulator: the real cores on virtual time, with seeded delays and faults.

Other folders use `outcome`, `scenario`.
Other folders use `history`, `scenario`, `world`.
"""
