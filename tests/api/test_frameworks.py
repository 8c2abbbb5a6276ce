"""A framework that trains without its adapter is told of, once."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.jobs import run_job

import paceline
from paceline.api.frameworks import ADAPTERS, missing_adapter
from paceline.api.session import Session


def accelerate(*, has_accelerator: bool) -> dict[str, object]:
    return {"accelerate.state": SimpleNamespace(is_initialized=lambda: has_accelerator)}


def test_accelerate_counts_once_there_is_an_accelerator() -> None:
    assert missing_adapter(accelerate(has_accelerator=False)) is None
    assert missing_adapter(accelerate(has_accelerator=True)) == "accelerate"


@pytest.mark.parametrize(("num_workers", "times"), [(1, 0), (2, 1)])
def test_one_worker_says_it_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    num_workers: int,
    times: int,
) -> None:
    monkeypatch.delitem(sys.modules, ADAPTERS, raising=False)
    monkeypatch.setitem(sys.modules, "transformers.trainer", SimpleNamespace())

    def work(_: Session) -> list[object]:
        models = [torch.nn.Linear(2, 1) for _ in range(2)]
        return [paceline.distributed(torch.optim.SGD(model.parameters(), lr=0.1)) for model in models]

    run_job(tmp_path, work, workers=num_workers)
    said = capfd.readouterr().err
    assert said.count("takes each of the 2 workers for the only one") == times
    assert said.count("paceline.integrations.transformers") == times
