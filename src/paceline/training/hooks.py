"""Hooks that torch keeps, and that keep no object of ours alive."""

from threading import Lock
from typing import Any
from weakref import WeakMethod

import torch
from torch.utils.hooks import RemovableHandle

from paceline.errors import UsageError


def call_if_alive(method: WeakMethod[Any], *args: object) -> Any:  # noqa: ANN401 - whatever the method returns
    """Call a method unless its owner is gone; with `functools.partial` a hook."""
    act = method()
    return None if act is None else act(*args)


def refuse_own_steps(optimizer: torch.optim.Optimizer, stepping: Lock, name: str) -> RemovableHandle:
    """Have the optimizer of a script refuse steps, but those during which its distributed one holds `stepping`.

    Its own step would change the values of one worker only, and none of the others would hear of it.
    """

    def refuse(*_: object) -> None:
        if not stepping.locked():
            raise UsageError(
                f"step of the {type(optimizer).__name__} that paceline.distributed was given for '{name}': it would "
                "train this worker alone. Step the optimizer that the call returned: "
                "optimizer = paceline.distributed(optimizer, ...)."
            )

    return optimizer.register_step_pre_hook(refuse)
