"""The dense benchmark: equal results, the promised fields, and a clear word on peers that are not installed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(script), *arguments], capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.campaign
@pytest.mark.timeout(300)
def test_both_sides_end_with_equal_values() -> None:
    done = run(ROOT / "benchmarks" / "dense.py", "--peer", "ddp", "--parameters", "1000", "--rounds", "2", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["name"] == "dense-ddp"
    assert found["workers"] == 2
    assert found["difference"] <= found["tolerance"]
    assert found["ratio"] > 0
    assert all(found[key] > 0 for key in ("ours_ms", "peer_ms", "floor_ms"))


@pytest.mark.campaign
@pytest.mark.timeout(300)
def test_every_size_is_measured_and_drawn(tmp_path: Path) -> None:
    picture = tmp_path / "new" / "sweep.png"
    options = ["--sizes", "1000", "--workers", "1", "--workers", "2", "--rounds", "2", "--picture", str(picture)]
    done = run(ROOT / "benchmarks" / "dense_sweep.py", *options, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [each["name"] for each in found["sizes"]] == ["torch-1-1000", "ddp-1-1000", "ddp-2-1000"]
    for each in found["sizes"]:
        assert each["difference"] <= 1e-5
        assert all(each[key] > 0 for key in ("ratio", "ours_ms", "peer_ms", "floor_ms"))
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_peer_without_its_environment_names_the_command_that_makes_it(tmp_path: Path) -> None:
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    code = (
        "import sys, runpy; from pathlib import Path; sys.path.insert(0, sys.argv[1]); import turns; "
        "turns.BENCHMARKS = Path(sys.argv[2]); sys.argv[1:] = ['--peer', 'ray']; "
        "runpy.run_module('dense', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT / "benchmarks"), str(tmp_path / "benchmarks")],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.strip().endswith("python benchmarks/peers/setup.py ray")
    assert len(done.stderr.strip().splitlines()) == 1
