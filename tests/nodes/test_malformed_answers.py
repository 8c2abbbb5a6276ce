"""What a server answers that makes no sense ends the wait for it, with its name and what it said."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save
from tests.nodes.cluster import cluster

from paceline.core.messages import Applied, Delivered, Fetched, Joined, PushId, Ticked
from paceline.errors import PeerError
from paceline.transport.base import EMPTY, Frame
from paceline.wire.malformed import read_answer_of
from paceline.wire.messages import KeysWanted, encode
from paceline.worker.table_calls import _read_piece


@pytest.mark.parametrize(
    "answer",
    [
        Delivered("nowhere", 1, 1, 0, ()),
        Fetched(7, "nowhere", 1, 1, 0, ()),
        Applied(PushId(1, 0, 0, 99)),
        KeysWanted("nowhere", -1, 3),
        Joined(-5),
        Ticked(2**63),
    ],
    ids=lambda answer: type(answer).__name__,
)
def test_an_answer_to_nothing_never_breaks_a_worker_unnamed(answer: object, tmp_path: Path) -> None:
    with cluster("memory", tmp_path, num_servers=1) as servers, servers.joined(0) as node:
        node._connections[0].on_frames([Frame(encode(answer), EMPTY)])
        if node._lock.failure:
            with pytest.raises(PeerError, match=f"server 0 sent a {type(answer).__name__} that makes no sense here"):
                node.leave()
        else:
            node.leave()


@pytest.mark.parametrize("body", [b"", bytes(16), save({"ids": torch.arange(2)}), save({"next_slot": torch.tensor(1)})])
def test_rows_that_are_none(body: bytes) -> None:
    with pytest.raises(PeerError, match=f"server 3 gave an invalid answer of {len(body)} bytes when asked for r"):
        read_answer_of(3, "rows", _read_piece, memoryview(body))
