"""The script of docs/frameworks.md for TorchTitan: it ends where torchtitan's own container under DDP ends."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.tidy.tree import ROOT

PAGE = ROOT / "docs" / "frameworks.md"
TIMEOUT_S = 600.0
RESULT = re.compile(r"torchtitan: 2 workers, from step (\d+), loss (\d+\.\d+)")
RUN = ("paceline", "run", "--workers", "2", "--quiet")
# What makes the script of the page one that DDP distributes.
ITS_OWN = {
    "import paceline\n": "import torch.distributed as dist\nfrom torch.nn.parallel import DistributedDataParallel\n",
    "from paceline.integrations.torchtitan import": "from torchtitan.components.optimizer import",
    "paceline.init()": 'dist.init_process_group("gloo")',
    "torch.nn.Linear(16, 1))\n": "torch.nn.Linear(16, 1))\nmodel = DistributedDataParallel(model)\n",
    "paceline.size()": "dist.get_world_size()",
    "paceline.rank()": "dist.get_rank()",
    "optimizers.clip_gradients(1.0)": "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
}
# Before the first step a state holds zeros, and one of another model is refused on every worker.
STATES = """
import paceline
import torch
from torchtitan.components.optimizer import ParamGroupConfig

from paceline.errors import UsageError
from paceline.integrations.torchtitan import OptimizersContainer

paceline.init()
first = {"pattern": "^0", "optimizer_name": "Adam", "optimizer_kwargs": {"lr": 0.01}}
rest = {"pattern": ".*", "optimizer_name": "AdamW", "optimizer_kwargs": {"lr": 0.02}}
config = OptimizersContainer.Config(
    param_groups=[ParamGroupConfig(**first), ParamGroupConfig(**rest)], options={"scale": "mean"}
)
model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
optimizers = config.build(model_parts=[model])
blank = optimizers.state_dict()
assert len(optimizers) == 2
averages = {key for key in blank if key.endswith(".exp_avg")}
assert averages == {f"state.{name}.exp_avg" for name, _ in model.named_parameters()}
assert all(not value.any() for key, value in blank.items() if key.startswith("state."))
for _ in range(3):
    optimizers.zero_grad()
    model(torch.ones(3) + paceline.rank()).sum().backward()
    optimizers.step()
taken = optimizers.state_dict()
assert taken["state.0.weight.step"] == 3 and taken["state.1.bias.exp_avg"].any()
optimizers.load_state_dict(blank | {"param_groups.1.bias.lr": 0.5, "param_groups.1.weight.lr": 0.5})
again = optimizers.state_dict()
assert all(not value.any() for key, value in again.items() if key.startswith("state."))
assert [each.param_groups[0]["lr"] for each in optimizers] == [0.01, 0.5]
del blank["state.1.weight.exp_avg"]
try:
    optimizers.load_state_dict(blank)
except UsageError as error:
    assert "the state has no 'state.1.weight.exp_avg'" in str(error)
    print("refused")
try:
    OptimizersContainer.Config(implementation="fused_opt_states_bf16").build(model_parts=[model])
except UsageError as error:
    assert "bfloat16" in str(error)
    print("refused")
"""

pytestmark = [
    pytest.mark.timeout(3 * TIMEOUT_S),
    pytest.mark.skipif(
        importlib.util.find_spec("torchtitan") is None,
        reason="torchtitan is not installed: pip install 'paceline[torchtitan]'",
    ),
]


def run(folder: Path, text: str, *command: str) -> str:
    """Run a script on two workers; return what they print."""
    folder.mkdir(exist_ok=True)
    (folder / "script.py").write_text(text)
    words = [sys.executable, "-m", *command, "script.py"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    return done.stdout


def ended(told: str) -> tuple[int, float]:
    """The step that a script of the page began at, and its loss, which worker 0 prints."""
    (found,) = RESULT.findall(told)
    return int(found[0]), float(found[1])


def test_the_loss_is_that_of_torchtitans_own_under_ddp_also_when_resumed(tmp_path: Path) -> None:
    (text,) = re.findall(r"```python needs=torchtitan\n(.*?)```", PAGE.read_text(), re.DOTALL)
    own = text
    for ours, theirs in ITS_OWN.items():
        assert ours in own
        own = own.replace(ours, theirs)
    first, loss = ended(run(tmp_path / "ours", text, *RUN))
    assert first == 0
    theirs = run(tmp_path / "theirs", own, "torch.distributed.run", "--nproc-per-node", "2")
    assert (first, loss) == pytest.approx(ended(theirs), abs=1e-5)
    assert ended(run(tmp_path / "ours", text, *RUN)) == pytest.approx((6, loss), abs=1e-6)


def test_the_example_of_the_container_runs(tmp_path: Path) -> None:
    text = "import doctest; from paceline.integrations import torchtitan; print(doctest.testmod(torchtitan))"
    assert run(tmp_path / "example", text, *RUN).count("TestResults(failed=0, attempted=8)") == 2


def test_states_of_several_optimizers_are_whole_before_the_first_step_and_others_are_refused(tmp_path: Path) -> None:
    assert run(tmp_path / "states", STATES, *RUN).count("refused") == 4
