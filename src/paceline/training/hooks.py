"""Hooks that torch keeps, and that keep no object of ours alive."""

from typing import Any
from weakref import WeakMethod


def call_if_alive(method: WeakMethod[Any], *args: object) -> Any:  # noqa: ANN401 - whatever the method returns
    """Call a method unless its owner is gone; with `functools.partial` a hook."""
    act = method()
    return None if act is None else act(*args)
