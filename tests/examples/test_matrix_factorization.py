"""Matrix factorization learns ratings, reads no row that is older than its policy allows, and knows its files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tests.examples.conftest import Alone
from tests.launch.warm import run_job

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = EXAMPLES / "matrix_factorization.py"
NUM_RATINGS = 3000


@pytest.fixture(autouse=True)
def _examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.fixture
def lines() -> np.ndarray:
    """User, item and rating of each line, after a model of one number a row."""
    rng = np.random.default_rng(0)
    users, items = rng.integers(60, size=NUM_RATINGS), rng.integers(40, size=NUM_RATINGS)
    return np.stack([users, items, np.sign(np.sin(users + 1.0) * np.cos(items)) + 3], axis=1).astype(np.int64)


def write(path: Path, lines: np.ndarray, between: str, heading: str = "") -> Path:
    """Write the lines with a fourth number behind, as the files of MovieLens have it."""
    path.write_text(heading + "".join(between.join(map(str, [*line, 880000000])) + "\n" for line in lines))
    return path


def test_it_learns_alone(tmp_path: Path, lines: np.ndarray, alone: Alone) -> None:
    done = alone(SCRIPT.name, write(tmp_path / "u.data", lines, "\t"), "--clocks", "200", "--step", "0.1")
    assert done.returncode == 0, done.stderr
    error, held_out = (float(word) for word in done.stdout.replace(",", "").split() if word[0] in "01" and "." in word)
    assert error < held_out < 0.5 < np.std(lines[:, 2])


def test_a_job_learns_and_reads_nothing_too_old(tmp_path: Path, lines: np.ndarray) -> None:
    from matrix_factorization_figure import differentials

    ratings, losses, folder = write(tmp_path / "u.data", lines, "\t"), tmp_path / "losses.json", tmp_path / "run"
    job = ("-n", "3", "--consistency", "ssp:2", "--run-dir", folder)
    done = run_job(*job, SCRIPT, ratings, "--clocks", "60", "--step", "0.1", "--watch", losses)
    assert done.returncode == 0, done.stdout
    curve = json.loads(losses.read_text())
    assert [clock for clock, _, _ in curve] == list(range(0, 61, 10))
    assert curve[0][2] == pytest.approx(0.9 * NUM_RATINGS * np.var(lines[:, 2]), rel=0.1)
    assert curve[-1][2] < 0.8 * curve[0][2]
    reads = differentials(folder / "trace")
    assert set(reads) <= {-3, -2, -1}
    assert reads[-3] > 0  # kept until the bound forces


def test_the_files_of_ratings_are_all_read_alike(tmp_path: Path, lines: np.ndarray) -> None:
    from ratings import load

    heading = "userId,movieId,rating,timestamp\n"
    paths = [
        write(tmp_path / "u.data", lines, "\t"),
        write(tmp_path / "ratings.dat", lines, "::"),
        write(tmp_path / "ratings.csv", lines, ",", heading),
    ]
    (training, test), *others = (load(path, seed=1) for path in paths)
    assert (len(training), len(test)) == (0.9 * NUM_RATINGS, 0.1 * NUM_RATINGS)
    assert training.values.mean().abs() < 1e-6
    for other in others:
        assert all(
            a.users.equal(b.users) and a.values.equal(b.values) for a, b in zip((training, test), other, strict=True)
        )
    assert not load(paths[0], seed=2)[0].users.equal(training.users)


@pytest.mark.parametrize(
    ("content", "said"), [("", "holds no ratings"), ("1\t2\tnan\n", "not finite"), ("1\t2\n", "user, item and rating")]
)
def test_what_is_no_file_of_ratings_is_said(tmp_path: Path, content: str, said: str) -> None:
    from ratings import load

    from paceline.errors import UsageError

    path = tmp_path / "u.data"
    path.write_text(content)
    with pytest.raises(UsageError, match=said):
        load(path, seed=0)
    with pytest.raises(UsageError, match="no ratings file"):
        load(tmp_path / "missing", seed=0)


def test_numbers_and_picture_tell_what_diverges(tmp_path: Path) -> None:
    from matrix_factorization_figure import Outcome, table
    from matrix_factorization_picture import draw

    bsp = Outcome("bsp", 0, [(0, 0.0, 100.0), (10, 1.0, 40.0)], {-1: 8})
    lost = Outcome("ssp:2", 0, [(0, 0.0, 100.0), (10, 1.0, float("nan"))], {-3: 3, -1: 1})
    *_, line = table([bsp, lost]).splitlines()
    assert line.split() == ["ssp:2", "diverges", "diverges", "25%", "-2.50", "0.75", "1.0"]
    assert bsp.is_stable
    assert not lost.is_stable
    draw(tmp_path / "picture.png", [bsp, lost], "two runs")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
