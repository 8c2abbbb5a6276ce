"""Servers of a test over tcp as if they were other machines: pushes in pieces, and values ahead of their clock."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
from torch import Tensor

from paceline.transport.tcp import TcpTransport
from paceline.worker.dense import DenseClient
from paceline.worker.pushes import PushOutcome


def make_distant(monkeypatch: pytest.MonkeyPatch, *, small: bool = True) -> None:
    """Treat every server as another machine; if `small`, a few hundred parameters as many: pieces have 16 float32."""
    monkeypatch.setattr(TcpTransport, "leaves_machine", lambda *_: True)
    if not small:
        return
    monkeypatch.setattr("paceline.worker.dense._LEAST_IN_PIECES_BYTES", 1)
    monkeypatch.setattr("paceline.worker.pushes._LEAST_PIECE_BYTES", 64)
    monkeypatch.setattr("paceline.worker.pushes._PAGE_BYTES", 64)
    monkeypatch.setattr("paceline.server.early_values._LEAST_BYTES", 1)
    monkeypatch.setattr("paceline.server.early_values._GRAIN_BYTES", 64)


def push_to_read(client: DenseClient, gradient: Tensor, **settings: Any) -> Future[PushOutcome]:
    """Push as a step of training does, after which the table is read."""
    buffer = client.reserve()
    buffer.gradient.copy_(gradient)
    return client.push_reserved(buffer, **settings).future
