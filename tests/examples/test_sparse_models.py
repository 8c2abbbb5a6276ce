"""Sparse logistic regression and the factorization machine learn what they promise; filters change nothing of it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.examples.conftest import Alone

EXAMPLES = Path(__file__).parents[2] / "examples"
TIMEOUT_S = 200
JOB = [sys.executable, "-m", "paceline", "run", "--quiet", "--no-progress", "-n", "2", "--transport", "memory"]

sys.path.insert(0, str(EXAMPLES))
from sparse_batches import area_under_curve  # noqa: E402
from sparse_samples import held_out, paragraphs, read_samples  # noqa: E402

sys.path.remove(str(EXAMPLES))


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*JOB, str(EXAMPLES / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment, check=False)


def found(pattern: str, done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stdout + done.stderr
    hits = re.findall(pattern, done.stdout)
    assert hits, done.stdout
    return hits


def test_filters_save_bytes_and_change_nothing(tmp_path: Path, alone: Alone) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "sparse.png"
    done = alone("sparse_logistic.py", "--clocks", "30", "--picture", str(picture))
    assert [float(change) for change in found(r"objective (\S+) beside no filters", done)] == [0.0, 0.0]
    assert found(r"([\d.]+)% saved; and", done) == ["50.0000"]
    (sent,) = found(r"key caching and KKT .* ([\d.]+)%\n", done)
    assert float(sent) > 60
    assert all(float(auc) > 0.6 for auc in found(r"0\.\d{6}\s+(0\.\d{4})", done))
    assert picture.stat().st_size > 10_000


def test_workers_learn_by_following_the_leader(tmp_path: Path) -> None:
    lines = [f"{'+1' if sample % 3 == 0 else '-1'} {sample % 3 + 1}:1 {sample % 7 + 4}:1\n" for sample in range(400)]
    (tmp_path / "samples").write_text("".join(lines))
    done = run("sparse_logistic.py", str(tmp_path / "samples"), "--solver", "ftrl", "--clocks", "40")
    assert all(float(auc) > 0.99 for auc in found(r"0\.\d{6}\s+(\d\.\d{4})", done))
    assert found(r"([\d.]+)% saved; and", done) == ["50.0000"]


def test_knowing_pairs_helps() -> None:
    pytest.importorskip("sklearn")
    done = run("factorization_machine.py", "--clocks", "50")
    plain, pairs, _ = (float(auc) for auc in found(r"test AUC (\S+)", done))
    assert 0.85 < plain < pairs


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"no file .*nowhere"):
        read_samples(tmp_path / "nowhere")


def test_samples_are_read_in_both_forms(tmp_path: Path) -> None:
    named, bare = tmp_path / "named", tmp_path / "bare"
    named.write_text("+1 3:0.5 9:1\n-1 4:1\n")
    bare.write_text("1 2 8\n-1 3\n")
    samples = read_samples(named)
    assert samples.labels.tolist() == read_samples(bare).labels.tolist() == [1.0, 0.0]
    assert samples.ids.tolist() == read_samples(bare).ids.tolist() == [3, 9, 4]
    assert samples.values.tolist() == [0.5, 1.0, 1.0]
    assert samples.owners.tolist() == [0, 0, 1]
    named.write_text("+1 3:\n")
    with pytest.raises(SystemExit, match="line 1"):
        read_samples(named)


def test_paragraphs_do_not_tell_the_answer() -> None:
    samples, words = paragraphs()
    train, test = held_out(samples)
    assert len(train) + len(test) == len(samples)
    assert set(samples.ids.tolist()) == set(words)
    assert not any("error" in word for word in words.values())


def test_the_area_under_the_curve_is_the_share_of_pairs_in_order() -> None:
    rng = np.random.default_rng(3)
    scores, labels = rng.integers(0, 6, 80) / 3, (rng.random(80) < 0.3).astype(float)
    above = np.sign(scores[labels > 0][:, None] - scores[labels == 0]) / 2 + 0.5
    assert area_under_curve(scores, labels) == pytest.approx(above.mean(), abs=1e-12)
