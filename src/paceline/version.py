"""Which version this is; apart from the package itself, so that every part may know it without importing all of it."""

from typing import Final

__version__: Final = "0.1.0"
