"""The programs that the launcher starts a job with, which it is told because they stand above it."""

import sys
from typing import Final

from paceline.launch.plan import Programs

PROGRAMS: Final = Programs(threads=(sys.executable, "-m", "paceline.api.threads"), preloaded="paceline.api.preloaded")
