"""Row tables as their user opens them, on the threads of real nodes."""

from __future__ import annotations

from typing import Any

import torch
from tests.nodes.cluster import Cluster
from torch import Tensor

from paceline.observe.trace import Trace
from paceline.server.row_table import ServedRowTable
from paceline.update.named_rules import Add
from paceline.update.rows.spec import RowTableSpec
from paceline.update.rules import RuleSpec
from paceline.worker.metrics import StepMetrics
from paceline.worker.node import WorkerNode
from paceline.worker.rows.state import CacheOptions
from paceline.worker.rows.table import RowTable
from paceline.worker.table_opener import TableOpener


def rows_of(name: str = "r", consistency: str = "ssp:1", *, rule: RuleSpec | None = None, **more: Any) -> RowTableSpec:
    """Return a table of rows of 2 numbers, unless `more` says otherwise."""
    given = {"width": 2, "dtype": "float64", "scale": "sum", "nonfinite": "reject"} | more
    return RowTableSpec(name=name, rule=rule or Add(), consistency=consistency, **given)


def open_rows(node: WorkerNode, spec: RowTableSpec, options: CacheOptions | None = None) -> RowTable:
    rank = node.settings.sender.worker
    return TableOpener(rank, node, StepMetrics(Trace(None), rank)).open_rows(spec, options or CacheOptions())


def served(servers: Cluster, table: str = "r") -> list[ServedRowTable]:
    """Return what the servers hold of a table; to look at while nothing happens."""
    return [server._tables[table] for server in servers.servers]


def stored(servers: Cluster, ids: Tensor, table: str = "r") -> Tensor:
    """Return rows as they lie on the servers: of each, from the one that has it."""
    parts = [each.store.read(ids, 0) for each in served(servers, table)]
    order, counts = servers.servers[0]._tables.host.ops.split(ids, len(parts))
    out = torch.empty_like(parts[0])
    for part, places in zip(parts, order.split(counts), strict=True):
        out[places] = part[places]
    return out
