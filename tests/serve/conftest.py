"""What holds for all tests of a server of its own."""

from tests.serve.house import served

__all__ = ["served"]
