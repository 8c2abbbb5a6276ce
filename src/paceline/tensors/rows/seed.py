"""What makes an index lay out its ids so that no peer can choose ids that get in each other's way."""

from __future__ import annotations

import secrets
from typing import Final, TypeAlias

Seed: TypeAlias = tuple[int, int]  # two unsigned numbers of 64 bits

NO_SEED: Final[Seed] = (0, 0)


def fresh_seed() -> Seed:
    """Return a seed that cannot be guessed."""
    return secrets.randbits(64), secrets.randbits(64)
