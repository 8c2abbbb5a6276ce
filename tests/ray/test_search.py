"""A search whose trials are jobs on Ray."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.launch.config import read_mapping

TIMEOUT_S = 240.0
SEARCH = """
method: grid
parameters: {lr: [0.25, 0.5]}
run: {engine: ray, workers: 1}
"""
SCRIPT = """
import os, sys
import paceline
paceline.init()
lr = float(sys.argv[1].partition("=")[2])
paceline.report(loss=1 - lr)
assert "RAY_JOB_ID" in os.environ, "this is no process of Ray's"
"""


@pytest.mark.campaign
@pytest.mark.timeout(300)
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_trials_run_on_ray_and_the_best_is_found(tmp_path: Path) -> None:
    (tmp_path / "search.yaml").write_text(SEARCH)
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "paceline", "tune", "-j", "2", "--out", "out", "search.yaml", "script.py"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=TIMEOUT_S,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "2 trials: 2 finished" in done.stdout
    best = read_mapping(tmp_path / "out" / "best.toml")
    assert best == {"engine": "ray", "workers": 1, "args": ["--lr=0.5"]}
