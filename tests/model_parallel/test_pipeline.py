"""Models held by real processes between them: equal to one process, refused in words, and named when one dies."""

from pathlib import Path

import pytest
from tests.faults.running import run_to_end, went_on_without

from paceline.errors import EXIT_LOST

SCRIPTS = Path(__file__).with_name("scripts")


@pytest.mark.parametrize("num_stages", [pytest.param(2, marks=pytest.mark.campaign), 4])
def test_a_pipeline_computes_what_one_process_does(tmp_path: Path, num_stages: int) -> None:
    options = ("-n", str(num_stages), "--strategy", f"pipeline:{num_stages}")
    code, run = run_to_end(tmp_path / "run", SCRIPTS / "stages.py", "die", options=options)

    assert code == EXIT_LOST, run.output
    assert "Traceback" not in run.output
    for name in ("1f1b", "gpipe", "recomputed", "measured", "layers", "batches", "dropout", "steps", "shapes"):
        assert len(run.saying(f"equal {name}")) == num_stages, run.output
    assert len(run.saying("told all that was refused")) == num_stages
    died = f"worker {num_stages - 2}"
    for rank in {*range(num_stages)} - {num_stages - 2}:  # no worker that lives is named, not even one that computes
        told = run.saying(f"death: worker {rank}, forward_backward: {died} is gone: its connection has ended")
        assert len(told) == 1, run.output
    assert len(run.saying("and after")) == num_stages - 1
    assert run.told() == went_on_without(died, needs_all=options[-1])


def test_layers_of_a_pipeline_may_do_what_those_of_one_process_may(tmp_path: Path) -> None:
    options = ("-n", "2", "--strategy", "pipeline:2")
    code, run = run_to_end(tmp_path / "run", SCRIPTS / "liberties.py", options=options)

    assert code == 0, run.output
    for name in ("tuples of one", "changes in place", "buffers", "modes", "names", "dicts", "precisions"):
        assert len(run.saying(f"equal {name}")) == 2, run.output
    assert len(run.saying("refused on all")) == 2, run.output
    assert len(run.saying("ended on all")) == 2, run.output


def test_a_buffer_of_two_stages_may_be_read_and_not_changed(tmp_path: Path) -> None:
    options = ("-n", "2", "--strategy", "pipeline:2")
    code, run = run_to_end(tmp_path / "run", SCRIPTS / "shared_buffers.py", options=options)

    assert code == 0, run.output
    for name in ("where it is read", "refusals where it is changed"):
        assert len(run.saying(f"equal {name}")) == 2, run.output


def test_replicas_of_a_pipeline_learn_what_one_process_learns_from_the_whole_batch(tmp_path: Path) -> None:
    code, run = run_to_end(tmp_path / "run", SCRIPTS / "replicas.py", options=("-n", "4"))

    assert code == 0, run.output
    for said in ("same under bsp by DistributedOptimizer", "same under all-reduce by CombinedOptimizer"):
        assert len(run.saying(said)) == 4, run.output
    for strategy in ("ssp:3", "local-sgd:2"):
        assert len(run.saying(f"under {strategy}")) == 4, run.output
    assert len(run.saying("closed")) == 4, run.output
    assert run.told() == [], run.output


@pytest.mark.parametrize("held", ["pipeline:2", "tensor:2"])
def test_what_is_clipped_is_what_the_step_takes_also_where_a_replica_has_no_batch(tmp_path: Path, held: str) -> None:
    options = ("-n", "4", "--strategy", f"all-reduce+{held}")
    code, run = run_to_end(tmp_path / "run", SCRIPTS / "clipping.py", options=options)

    assert code == 0, run.output
    for name in ("clipped", "accumulated", "weighed"):
        assert len(run.saying(f"equal {name}")) == 4, run.output
    assert len(run.saying("told of other values")) == 4, run.output
    assert len(run.saying("forward_backward equally often for a step")) == 4, run.output
