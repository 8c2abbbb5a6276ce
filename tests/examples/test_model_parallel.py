"""The examples of model parallelism learn as jobs of several workers."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.launch.warm import run_job

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = "--text {} --steps 30 --batch 8 --length 16 --width 32 --blocks 2 --heads 2"


def told(pattern: str, done: subprocess.CompletedProcess[str]) -> float:
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(pattern, done.stdout)
    assert found is not None, done.stdout
    return float(found[1])


def test_bert_learns_in_stages() -> None:
    done = run_job(
        "-n", "2", "--strategy", "pipeline:2", EXAMPLES / "bert.py", "--made-up", "--rate", "3e-3", "--width", "32"
    )
    assert told(r"accuracy (\d\.\d+)", done) > 0.95


def test_gpt_learns_a_rhyme_with_its_layers_split(tmp_path: Path) -> None:
    rhyme = tmp_path / "rhyme.txt"
    rhyme.write_text("one two three four five once I caught a fish alive\n" * 40)
    done = run_job("-n", "2", "--strategy", "tensor:2", EXAMPLES / "gpt.py", *TINY.format(rhyme).split())
    assert told(r"held-out loss (\d\.\d+)", done) < 2.5  # 3.1 knows nothing


def test_a_big_perceptron_fits_in_slices() -> None:
    small = ["--width", "256", "--blocks", "2", "--steps", "2"]
    done = run_job("-n", "2", "--strategy", "fsdp", EXAMPLES / "big_mlp.py", *small)
    assert told(r"taken (\d+) MB", done) < 450
