"""The examples of model parallelism learn as jobs of several workers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
TIMEOUT_S = 200
JOB = [sys.executable, "-m", "paceline", "run", "--quiet", "--no-progress", "-n", "2"]
TINY = "--text {} --steps 30 --batch 8 --length 16 --width 32 --blocks 2 --heads 2"


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment, check=False)


def told(pattern: str, done: subprocess.CompletedProcess[str]) -> float:
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(pattern, done.stdout)
    assert found is not None, done.stdout
    return float(found[1])


def test_bert_learns_in_stages() -> None:
    done = run(*JOB, "--strategy", "pipeline:2", EXAMPLES / "bert.py", "--made-up", "--rate", "3e-3", "--width", "32")
    assert told(r"accuracy (\d\.\d+)", done) > 0.95


def test_gpt_learns_a_rhyme_with_its_layers_split(tmp_path: Path) -> None:
    rhyme = tmp_path / "rhyme.txt"
    rhyme.write_text("one two three four five once I caught a fish alive\n" * 40)
    done = run(*JOB, "--strategy", "tensor:2", EXAMPLES / "gpt.py", *TINY.format(rhyme).split())
    assert told(r"held-out loss (\d\.\d+)", done) < 2.5  # 3.1 knows nothing
