"""What holds for all tests of a server of its own."""

from tests.serve.daemon import served

__all__ = ["served"]
