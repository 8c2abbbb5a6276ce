"""What a rule of torch has to import first keeps no other client waiting."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue

import pytest

from paceline.server import preload
from paceline.server.preload import RulePreload
from paceline.torch_private import DYNAMO
from paceline.update import named_rules as update

NADAM = update.RuleSpec("torch.optim.NAdam", ({},))
KERNELS = (update.SGD(lr=0.1), update.Add())


def test_requests_wait_for_the_import_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
    gate, done = threading.Event(), list[str]()
    monkeypatch.delitem(sys.modules, DYNAMO, raising=False)
    monkeypatch.setattr(preload.importlib, "import_module", lambda _: gate.wait(120))
    warm = RulePreload(calls.put)
    assert not any(warm.defer((0, 0), rule, lambda: done.append("kernel")) for rule in KERNELS)
    for number in range(3):
        assert warm.defer((0, 0), NADAM, lambda n=number: done.append(f"first {n}"))
    assert warm.defer((1, 0), NADAM, lambda: done.append("second"))
    gate.set()
    calls.get(timeout=30)()
    assert done == ["first 2", "second"]
    assert not warm.defer((1, 0), NADAM, lambda: done.append("third"))
    warm.close(30)
