"""The state of an optimizer, gathered from the servers and sent back, in torch's own form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from safetensors.torch import load, save
from torch import Tensor

from paceline.node.layout import spans
from paceline.node.requests import LoadState, SaveState
from paceline.node.table import Table
from paceline.tensors.gather import OptimizerState, gather_optimizer, split_optimizer
from paceline.tensors.table import Hyper


def fetch_state(table: Table, hyper: Sequence[Hyper]) -> dict[str, Any]:
    """Return the state of a table's update rule as the `state_dict` of the plain torch optimizer."""
    layout = spans(table.spec, table.node.num_servers)
    bodies = table.node.ask_all(
        lambda number: SaveState(number, table.name), f"the servers' state of table '{table.name}'"
    )
    parts = [(span, load(bytes(body))) for span, body in zip(layout, bodies, strict=True)]
    return cast("dict[str, Any]", gather_optimizer(table.spec, parts, hyper))


def send_state(table: Table, state_dict: dict[str, Any], values: Tensor) -> None:
    """Set values, (elements of the table,), and rule state of a table on all servers."""
    layout = spans(table.spec, table.node.num_servers)
    bodies: list[memoryview] = []
    for span in layout:
        state = split_optimizer(table.spec, cast("OptimizerState", state_dict), span)
        bodies.append(memoryview(save({**state, "values": values[span.start : span.stop].clone()})))
    table.node.ask_all(lambda number: LoadState(number, table.name), f"servers to load table '{table.name}'", bodies)
