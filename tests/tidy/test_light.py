"""What must start at once does not load what takes a second."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "numpy", "matplotlib", "sklearn")
LIGHT = (
    "paceline",
    "paceline.cli",
    "paceline.core.server",
    "paceline.core.worker",
    "paceline.launch.local",
    "paceline.observe.progress",
    "paceline.simulate.world",
    "paceline.transport",
)


@pytest.mark.parametrize("module", LIGHT)
def test_importing_loads_nothing_heavy(module: str) -> None:
    program = f"import sys, {module}; print(*(name for name in {HEAVY!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout.split() == []


def test_a_script_that_does_not_shard_its_model_does_not_load_what_that_takes() -> None:
    program = "import sys, paceline.api.script; print('torch.distributed.tensor' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=250, check=True)
    assert done.stdout.strip() == "False"
