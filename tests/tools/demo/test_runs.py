from pathlib import Path

import numpy as np
import pytest

from paceline.core.consistency import Consistency
from paceline.launch.plan import LocalRun
from paceline.tools.demo.command import write_digits
from paceline.tools.demo.runs import BATCH, RATE, RUN_NAMES, RunName, Setting, plan

SETTING = Setting(Path("digits.npz"), num_workers=4, num_servers=2, epochs=6, seed=0)


def option(run: LocalRun, name: str) -> float:
    return next(float(arg.partition("=")[2]) for arg in run.args if arg.startswith(f"--{name}="))


def test_every_model_is_run_by_its_name() -> None:
    named = [plan(name, SETTING, Path("run")).launch.consistency or "" for name in RUN_NAMES]
    assert named == ["bsp", "ssp:3", "essp:3", "asynchronous", "", "bsp"]
    assert [str(Consistency.parse(text)) for text in named if text] == [text for text in named if text]
    assert plan("all-reduce", SETTING, Path("run")).launch.strategy == "all-reduce"


@pytest.mark.parametrize("name", RUN_NAMES)
def test_all_runs_step_equally_far_for_each_example(name: RunName) -> None:
    run = plan(name, SETTING, Path("run")).launch
    updates_of_a_clock = 1 if run.consistency in ("bsp", None) else run.num_workers
    assert option(run, "lr") * updates_of_a_clock == pytest.approx(RATE)
    assert option(run, "batch") * run.num_workers == BATCH * SETTING.num_workers


def test_one_process_takes_as_long_as_all_workers_together() -> None:
    alone, together = (plan(name, SETTING, Path("run")).launch for name in ("single", "bsp"))
    assert option(alone, "compute-ms") == 4 * option(together, "compute-ms")
    assert (alone.num_workers, alone.transport) == (1, "memory")


def test_the_digits_are_cut_by_seed(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_digits(tmp_path / f"{name}.npz", seed)
    a, b, c = (np.load(tmp_path / f"{name}.npz") for name in "abc")
    assert a["images"].shape == (1797, 64)
    assert (a["images"].min(), a["images"].max()) == (0, 1)
    assert (a["labels"] == b["labels"]).all()
    assert not (a["labels"] == c["labels"]).all()
