"""The entry points that the launcher starts, handed to it by name, as it may not import what stands above it."""

import sys
from typing import Final

from paceline.launch.plan import Programs

PROGRAMS: Final = Programs(threads=(sys.executable, "-m", "paceline.api.threads"), preloaded="paceline.api.preloaded")
