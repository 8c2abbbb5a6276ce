"""How a loss of a batch follows from those of its micro-batches, and what is refused where it does not."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from tests.faults.running import run_to_end
from torch import Tensor, nn
from torch.nn import functional

from paceline.errors import UsageError
from paceline.model_parallel.losses import (
    BatchLoss,
    Joining,
    PieceLoss,
    batch_dims,
    cut_targets,
    joined_pieces,
    joining_of,
    one_number,
    require_joining,
)

SCRIPT = Path(__file__).with_name("scripts") / "losses.py"
CASES = (
    *("mean", "sum", "sum of a module", "holes", "other holes", "weights", "smoothed", "probabilities", "squares"),
    *("sum of squares", "weighed bits", "function", "all with all", "names", "turned", "said mean", "said sum"),
    *("said weight", "places", "frozen parts", "statistics", "what is kept", "structures", "micro-batches of one"),
)


def test_any_loss_of_two_stages_is_that_of_one_process(tmp_path: Path) -> None:
    code, run = run_to_end(tmp_path / "run", SCRIPT, options=("-n", "2", "--strategy", "pipeline:2"))

    assert code == 0, run.output
    for name in CASES:
        assert len([line for line in run.lines if line.endswith(f"equal {name}")]) == 2, run.output


@pytest.mark.parametrize("held", ["tensor:2", pytest.param("pipeline:2+tensor:2", marks=pytest.mark.campaign)])
def test_any_loss_of_scores_that_are_split_is_that_of_one_process(tmp_path: Path, held: str) -> None:
    script, size = SCRIPT.with_name("split_losses.py"), 2 if held == "tensor:2" else 4
    code, run = run_to_end(tmp_path / "run", script, options=("-n", str(size), "--strategy", held))

    assert code == 0, run.output
    for name in ("mean", "said", "sum", "weights", "smoothed", "mixed", "surprise", "each", "by hand"):
        assert len([line for line in run.lines if line.endswith(f"equal {name}")]) == size, run.output


def ours(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.mse_loss(outputs, targets)


def hooked() -> nn.Module:
    loss = nn.MSELoss()
    loss.register_forward_hook(lambda *_: None)
    return loss


def test_only_what_is_torchs_own_is_known() -> None:
    assert joining_of(nn.CrossEntropyLoss(reduction="sum"), None) == Joining(is_sum=True, is_known=True)
    assert joining_of(functional.mse_loss, "mean") == Joining(is_known=True, is_aligned=True)
    for loss in (
        *(ours, hooked(), lambda *both: ours(*both), type("Own", (nn.MSELoss,), {})(), nn.KLDivLoss()),
        *(partial(functional.mse_loss, torch.ones(1)), partial(functional.cross_entropy, size_average=False)),
        nn.BCEWithLogitsLoss(pos_weight=torch.ones(2)),
        nn.CrossEntropyLoss(weight=torch.tensor([0.0, 1.0]), label_smoothing=0.1),  # class 0 counts by its smoothing
    ):
        assert joining_of(loss, None) is None, loss
        assert joining_of(loss, "sum") == Joining(is_sum=True)
    with pytest.raises(UsageError, match="reduction is 'sum', but the loss has reduction='mean'"):
        joining_of(nn.MSELoss(), "sum")
    with pytest.raises(UsageError, match="reduction='none', expected one number"):
        joining_of(nn.MSELoss(reduction="none"), None)
    with pytest.raises(UsageError, match="reduction is 'max', expected 'mean', 'sum'"):
        joining_of(ours, "max")  # pyright: ignore[reportArgumentType]


def test_what_the_script_says_is_tried_on_the_first_batch() -> None:
    outputs, targets = torch.randn(2, 3), torch.randn(8, 3)
    pieces = cut_targets(targets, 8, 4)
    require_joining(ours, Joining(), outputs, [0], targets, pieces)
    with pytest.raises(UsageError, match=r"loss of a batch is the sum of those.*the loss of all 4 together is"):
        require_joining(ours, Joining(is_sum=True), outputs, [0], targets, pieces)
    with pytest.raises(UsageError, match="mean, weighed as the script says"):
        require_joining(ours, Joining(weigh=lambda one: float(one.sum()) ** 2), outputs, [0], targets, pieces)
    require_joining(ours, Joining(is_sum=True), outputs, [None], targets, pieces)  # of these nothing is known


def test_targets_that_would_be_spread_over_outputs_are_refused() -> None:
    taking = PieceLoss(functional.mse_loss, Joining(is_aligned=True), [torch.ones(4, 1)])
    with pytest.raises(UsageError, match="be broadcast"):
        taking(torch.ones(4))


def test_outputs_that_do_not_grow_with_the_batch_need_a_reduction() -> None:
    small = (torch.ones(2, 3, requires_grad=True), torch.ones((), requires_grad=True), torch.ones(5), None)
    large = (torch.ones(4, 3, requires_grad=True), torch.ones((), requires_grad=True), torch.ones(5), None)
    assert batch_dims(small, large, True) == [0, None, None, None]
    with pytest.raises(UsageError, match=r"an output of shape \(\) does not grow with the batch: give reduction='"):
        batch_dims(small, large, False)


def test_outputs_that_do_not_grow_are_those_of_the_batch_or_refused() -> None:
    same = (torch.tensor(float("nan")), torch.tensor([True]), 2, None)
    assert joined_pieces([(torch.ones(1), *same)] * 2, [0, *([None] * 4)])[1:] == [*same]
    for one, other in ((torch.ones(()), torch.zeros(())), (torch.ones(1), torch.ones(2)), (0.5, 0.25)):
        with pytest.raises(UsageError, match="does not grow with the batch and differs between its micro-batches"):
            joined_pieces([(one,), (other,)], [None])


@pytest.mark.parametrize("found", [(torch.ones(()), torch.ones(3)), torch.ones(2), 0.5, None])
def test_a_loss_is_a_tensor_of_one_number(found: object) -> None:
    def loss(outputs: Tensor, targets: object) -> Tensor:
        del outputs, targets
        return found  # pyright: ignore[reportReturnType] - scripts are not typed

    for taking in (PieceLoss(loss, Joining(), [0]), BatchLoss(loss, 0, 1, [None])):
        with pytest.raises(UsageError, match=r"the loss gives .* expected a tensor with one number for the batch"):
            taking(torch.ones(2, requires_grad=True))
    assert one_number(torch.ones(1, 1)).shape == (1, 1)


def test_a_batch_that_is_not_cut_may_have_any_loss() -> None:
    outputs = torch.ones(3, requires_grad=True), torch.ones((), requires_grad=True), torch.ones(1, requires_grad=True)
    taking = BatchLoss(lambda outputs, _: outputs[0].sum() * outputs[1], None, 1, [None, None, None])
    taking(outputs).backward()
    assert [one.grad is not None and one.grad.tolist() for one in outputs] == [[1.0, 1.0, 1.0], 3.0, False]


def test_targets_are_cut_where_they_have_an_entry_for_each_sample() -> None:
    first, second = cut_targets({"a": torch.arange(4), "b": torch.arange(3), "c": 7}, 4, 2)
    assert [one["a"].tolist() for one in (first, second)] == [[0, 1], [2, 3]]
    assert (second["b"].tolist(), second["c"]) == ([0, 1, 2], 7)
    with pytest.raises(UsageError, match="4 samples and 3 targets, expected as many"):
        cut_targets(torch.arange(3), 4, 2)


def test_a_loss_may_learn_and_leave_outputs_out() -> None:
    scale = nn.Parameter(torch.ones(()))
    taking = BatchLoss(lambda outputs, targets: (scale * outputs[0] * targets).sum(), torch.ones(4), 2, [0, 0])
    pieces = [(torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)) for _ in range(2)]
    for begun in [taking(piece) for piece in pieces]:
        begun.backward()
    assert (float(taking.total), float(scale.grad or 0)) == (4.0, 4.0)
    assert all(one.grad is not None and other.grad is None for one, other in pieces)
