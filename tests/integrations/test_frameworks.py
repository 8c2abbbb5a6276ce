"""The scripts of docs/frameworks.md: workers know their ranks, and end where the framework's own DDP ends."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.tidy.tree import ROOT

PAGE = ROOT / "docs" / "frameworks.md"
NAMES = ("trainer", "lightning", "fabric", "accelerate")
TORCHRUN = ["torch.distributed.run", "--nproc-per-node", "2"]
TIMEOUT_S = 1000.0
RESULT = re.compile(r"(\w+): 2 workers, loss (\d+\.\d+)")
# What makes a script of the page one that the framework distributes itself.
ITS_OWN = {
    "from paceline.integrations.transformers import": "from transformers import",
    "from paceline.integrations.accelerate import": "from accelerate import",
    "import paceline.integrations.lightning": "",
    "import paceline.integrations.fabric": "",
    'strategy="paceline"': 'strategy="ddp"',
}
# Scripts follow one another in the same two processes, as most of what they cost is the import of frameworks.
ALL = """
import sys
from pathlib import Path

for script in sys.argv[1:]:
    exec(compile(Path(script).read_text(), script, "exec"), {"__name__": "__main__"})
"""

pytestmark = [
    pytest.mark.timeout(3 * TIMEOUT_S),  # the import of frameworks alone is half a minute on a busy machine
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("lightning", "transformers", "accelerate")),
        reason="lightning, transformers and accelerate are not installed: pip install 'paceline[lightning,hf]'",
    ),
]


def scripts() -> dict[str, str]:
    """The scripts of the page, by the name that they print."""
    found = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(found) == len(NAMES)
    return dict(zip(NAMES, found, strict=True))


def run(folder: Path, command: list[str], texts: dict[str, str]) -> dict[str, float]:
    """Run scripts one after the other on two workers; return what worker 0 has printed of each, which is all of it."""
    folder.mkdir()
    (folder / "all.py").write_text(ALL)
    for name, text in texts.items():
        (folder / f"{name}_script.py").write_text(text)  # not the name of the framework, which it would hide
    words = [sys.executable, "-m", *command, "all.py", *(f"{name}_script.py" for name in texts)]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    told = RESULT.findall(done.stdout)
    assert [name for name, _ in told] == list(texts), done.stdout + done.stderr
    return {name: float(loss) for name, loss in told}


def test_scripts_of_the_page_run_as_one_job(tmp_path: Path) -> None:
    found = run(tmp_path / "job", ["paceline", "run", "--workers", "2", "--quiet"], scripts())
    assert all(0 < loss < 100 for loss in found.values())
    saved = sorted(str(path.relative_to(tmp_path / "job")) for path in (tmp_path / "job" / "runs").rglob("*.ckpt"))
    assert saved == ["runs/fabric.ckpt", "runs/lightning/checkpoints/epoch=1-step=8.ckpt"]
    assert {path.name for path in (tmp_path / "job" / "runs" / "trainer").iterdir()} == {"checkpoint-4", "checkpoint-8"}


def test_a_loader_that_is_sharded_is_left_as_it_is_by_each_framework(tmp_path: Path) -> None:
    script = Path(__file__).parent / "scripts" / "sharded_loaders.py"
    words = [sys.executable, "-m", "paceline", "run", "--workers", "2", "--quiet", str(script)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    told = [json.loads(line.partition("] ")[2]) for line in done.stdout.splitlines() if '"seen"' in line]
    for name in NAMES:
        ranks = sorted((line for line in told if line["name"] == name), key=lambda line: line["rank"])
        assert [line["rank"] for line in ranks] == [0, 1]
        assert [line["batches"] for line in ranks] == [16, 16]
        half = len(ranks[0]["seen"]) // 2
        first, second = (
            [seen for line in ranks for seen in line["seen"][part]] for part in (slice(half), slice(half, None))
        )
        assert sorted(first) == sorted(second) == list(range(24)), name
        assert first != second, f"{name}: the second epoch has the order of the first"
    one, other = (json.loads(line.partition("] ")[2]) for line in done.stdout.splitlines() if '"means"' in line)
    assert one == other, "modules that are set up before their optimizers have the statistics of all workers"
    assert all(one["means"])
    assert done.stdout.count('{"local": 4}') == 2, "of six passes two are the last of a step"


@pytest.mark.campaign
@pytest.mark.parametrize("name", NAMES)
def test_the_loss_is_that_of_the_frameworks_own_ddp_also_when_resumed(tmp_path: Path, name: str) -> None:
    text = scripts()[name]
    saved, train = "../ours/runs/trainer/checkpoint-4", "trainer.train()"
    resumed = text.replace(train, f'trainer.train(resume_from_checkpoint="{saved}")') if train in text else None
    own = text
    for ours, theirs in ITS_OWN.items():
        own = own.replace(ours, theirs)
    assert own != text
    ours = run(tmp_path / "ours", ["paceline", "run", "--workers", "2", "--quiet"], {name: text})
    theirs = run(tmp_path / "theirs", TORCHRUN, {name: own})
    assert ours == pytest.approx(theirs, abs=1e-5)
    if resumed is not None:
        again = run(tmp_path / "again", ["paceline", "run", "--workers", "2", "--quiet"], {name: resumed})
        assert again == pytest.approx(ours, abs=1e-6)


@pytest.mark.campaign
@pytest.mark.parametrize("name", ["accelerate", "fabric", "lightning"])
def test_a_resumed_run_ends_as_under_the_frameworks_own_ddp(tmp_path: Path, name: str) -> None:
    script = Path(__file__).parent / "scripts" / "resumed.py"
    launchers = {"paceline": ["paceline", "run", "--workers", "2", "--quiet"], "ddp": TORCHRUN}
    found: dict[str, list[float]] = {engine: [] for engine in launchers}
    for engine, launcher in launchers.items():
        for more in ([], ["resume"]):
            words = [sys.executable, "-m", *launcher, str(script), name, engine, *more]
            done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S)
            assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
            found[engine] += [float(loss) for _, loss in RESULT.findall(done.stdout)]
    assert len(found["ddp"]) == 2
    assert found["paceline"] == pytest.approx(found["ddp"], abs=1e-5)


def test_a_missing_framework_is_told_with_what_to_install(tmp_path: Path) -> None:
    code = "import sys; sys.modules['accelerate'] = None; import paceline.integrations.accelerate"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode != 0
    assert "pip install 'paceline[hf]'" in done.stderr
