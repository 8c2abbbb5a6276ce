"""Layers whose rows live on the servers give what those of torch give: forward, backward, and after steps."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline.api.session import Session
from paceline.errors import IdOutOfRange, NoWeight, UsageError
from paceline.transport.memory import MemoryConnection
from paceline.update.rules import RuleSpec
from paceline.wire.messages import StepFrame, decode
from paceline.worker.rows.client import MAX_UNDER_WAY

NUM, WIDTH = 20, 3
SGD = paceline.update.SGD(lr=0.5)

RULES = {
    "sgd": (SGD, lambda rows: torch.optim.SGD([rows], lr=0.5)),
    "adagrad": (paceline.update.Adagrad(lr=0.5), lambda rows: torch.optim.Adagrad([rows], lr=0.5)),
}
MakeOptimizer = Callable[[Tensor], torch.optim.Optimizer]


@pytest.fixture
def ps() -> Iterator[Session]:
    with paceline.connect() as session, torch.sparse.check_sparse_tensor_invariants():  # torch wants a yes or a no
        yield session


def like(ours: paceline.Embedding | paceline.EmbeddingBag, theirs: nn.Embedding | nn.EmbeddingBag) -> None:
    """Give a torch module the rows of one of ours."""
    with torch.no_grad():
        theirs.weight.copy_(ours.table.pull(range(NUM)))
        if theirs.padding_idx is not None:
            theirs.weight[theirs.padding_idx] = 0


def ids_of_step(step: int, shape: tuple[int, ...] = (4, 5)) -> Tensor:
    return torch.randint(NUM, shape, generator=torch.Generator().manual_seed(step))


def loss_of(found: Tensor) -> Tensor:
    return (found.sin() * torch.arange(1.0, found.numel() + 1).view_as(found)).mean()


@pytest.mark.parametrize(("update", "make"), RULES.values(), ids=RULES)
@pytest.mark.parametrize("padding", [None, 3, -1])
def test_an_embedding_learns_as_that_of_torch(
    ps: Session, update: RuleSpec, make: MakeOptimizer, padding: int | None
) -> None:
    ours = paceline.Embedding(NUM, WIDTH, padding, update=update, ps=ps)
    theirs = nn.Embedding(NUM, WIDTH, padding, sparse=True)
    assert ours.padding_idx == theirs.padding_idx
    like(ours, theirs)
    optimizer = make(theirs.weight)
    for step in range(12):
        ids = ids_of_step(step)
        found, expected = ours(ids), theirs(ids)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        optimizer.zero_grad()
        loss_of(expected).backward()
        optimizer.step()
        loss_of(found).backward()
        ps.clock()
    everything = torch.arange(NUM)
    torch.testing.assert_close(ours(everything), theirs(everything), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("by_frequency", [False, True])
def test_sgd_gives_the_same_bits(ps: Session, by_frequency: bool) -> None:
    ours = paceline.Embedding(NUM, WIDTH, None, None, 2.0, by_frequency, update=SGD, ps=ps)
    theirs = nn.Embedding(NUM, WIDTH, None, None, 2.0, by_frequency)
    like(ours, theirs)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.5)
    for step in range(12):
        optimizer.zero_grad()
        loss_of(theirs(ids_of_step(step))).backward()
        optimizer.step()
        loss_of(ours(ids_of_step(step))).backward()
        ps.clock()
    assert torch.equal(ours.table.pull(range(NUM)), theirs.weight.detach())


BAGS = {
    "rows": (ids_of_step(1), None, False),
    "one empty, one repeated": (torch.tensor([1, 1, 1, 2, 7]), torch.tensor([0, 0, 3]), False),
    "the last empty": (torch.tensor([4, 5]), torch.tensor([0, 2]), False),
    "with the last offset": (torch.tensor([4, 5, 4]), torch.tensor([0, 2, 3]), True),
    "all empty": (torch.tensor([], dtype=torch.int64), torch.tensor([0, 0]), False),
    "all padding": (torch.tensor([3, 3]), torch.tensor([0, 1]), False),
    "by columns": (ids_of_step(1).t(), None, False),
    "not contiguous": (ids_of_step(1)[:, 0], torch.tensor([0, 1]), False),
    "32 bits": (torch.tensor([4, 3, 4], dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32), False),
}


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize(("ids", "offsets", "last"), BAGS.values(), ids=BAGS)
@pytest.mark.parametrize("padding", [None, 3])
def test_a_bag_is_that_of_torch(
    ps: Session, mode: str, ids: Tensor, offsets: Tensor | None, last: bool, padding: int | None
) -> None:
    ours = paceline.EmbeddingBag(
        NUM, WIDTH, mode=mode, update=SGD, include_last_offset=last, padding_idx=padding, ps=ps
    )
    theirs = nn.EmbeddingBag(NUM, WIDTH, mode=mode, include_last_offset=last, padding_idx=padding)
    like(ours, theirs)
    found, expected = ours(ids, offsets), theirs(ids, offsets)
    torch.testing.assert_close(found, expected)
    loss_of(found).backward()
    loss_of(expected).backward()
    ps.clock()
    with torch.no_grad():
        theirs.weight -= 0.5 * theirs.weight.grad
        others = [row for row in range(NUM) if row != padding]
    torch.testing.assert_close(ours.table.pull(others), theirs.weight.detach()[others])


@pytest.mark.parametrize(("update", "make"), RULES.values(), ids=RULES)
def test_a_weighted_bag_learns_rows_and_weights(ps: Session, update: RuleSpec, make: MakeOptimizer) -> None:
    ours = paceline.EmbeddingBag(NUM, WIDTH, mode="sum", update=update, ps=ps)
    theirs = nn.EmbeddingBag(NUM, WIDTH, mode="sum", sparse=True)
    like(ours, theirs)
    optimizer = make(theirs.weight)
    weights = torch.rand(4, 5, generator=torch.Generator().manual_seed(0))
    for step in range(6):
        ids, w_ours, w_theirs = ids_of_step(step), weights.clone().requires_grad_(), weights.clone().requires_grad_()
        loss_of(ours(ids, None, w_ours)).backward()
        optimizer.zero_grad()
        loss_of(theirs(ids, None, w_theirs)).backward()
        torch.testing.assert_close(w_ours.grad, w_theirs.grad)
        optimizer.step()
        ps.clock()
    torch.testing.assert_close(ours.table.pull(range(NUM)), theirs.weight.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3, 4)])
def test_ids_may_have_any_shape(ps: Session, shape: tuple[int, ...]) -> None:
    ours = paceline.Embedding(None, WIDTH, update=SGD, ps=ps)
    assert ours(torch.full(shape, 7)).shape == (*shape, WIDTH)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.uint32])
def test_ids_may_have_any_integer_type_and_need_not_be_contiguous(ps: Session, dtype: torch.dtype) -> None:
    ours = paceline.Embedding(NUM, WIDTH, update=SGD, ps=ps)
    batch = torch.arange(12).view(4, 3).to(dtype)
    assert torch.equal(ours(batch[:, 0]), ours.table.pull([0, 3, 6, 9]))
    ours.prefetch(batch[:, 0], ahead=0)


# -- compared with torch over random programs -------------------------------------------------------------------------


def frequency_scaled(ids: Tensor, gradient: Tensor) -> Tensor:
    """Divide the gradient of a table by how often each row is among the ids: what torch's bags do on a GPU."""
    return gradient / ids.view(-1).bincount(minlength=NUM).clamp(min=1).unsqueeze(1)


def program_of(seed: int) -> tuple[dict[str, object], list[tuple[Tensor, Tensor | None, Tensor | None]]]:
    """Return the settings of a bag, and (ids, offsets, weights) of each forward pass of a clock."""
    dice = random.Random(seed)
    mode = dice.choice(["sum", "mean", "max"])
    last = dice.random() < 0.3
    settings = {
        "mode": mode,
        "scale_grad_by_freq": mode != "max" and dice.random() < 0.5,
        "include_last_offset": last,
        "padding_idx": dice.choice([None, 3, -1]),
    }
    torch_dice, passes = torch.Generator().manual_seed(seed), []
    for _ in range(dice.randint(1, 3)):
        flat = last or dice.random() < 0.5
        num = dice.randint(0, 9)
        ids = torch.randint(dice.choice([4, NUM]), (num,) if flat else (num, 3), generator=torch_dice)
        middle = sorted(dice.randint(0, num) for _ in range(dice.randint(0, 4)))
        offsets = torch.tensor([0, *middle, *[num] * last]) if flat else None
        weighted = mode == "sum" and dice.random() < 0.5
        weights = torch.randn(ids.shape, generator=torch_dice, dtype=torch.float64) if weighted else None
        passes.append((ids, offsets, weights))
    return settings, passes


@pytest.mark.parametrize("seed", range(60))
def test_bags_give_and_learn_what_those_of_torch_do(ps: Session, seed: int) -> None:
    settings, passes = program_of(seed)
    ours = paceline.EmbeddingBag(NUM, WIDTH, update=paceline.update.Add(), dtype=torch.float64, ps=ps, **settings)
    by_frequency = settings.pop("scale_grad_by_freq")
    theirs = nn.EmbeddingBag(NUM, WIDTH, dtype=torch.float64, **settings)
    like(ours, theirs)
    before, learned = ours.table.pull(range(NUM)), torch.zeros(NUM, WIDTH, dtype=torch.float64)
    for ids, offsets, weights in passes:
        leaves = [None if weights is None else weights.clone().requires_grad_() for _ in range(2)]
        found, expected = ours(ids, offsets, leaves[0]), theirs(ids, offsets, leaves[1])
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        theirs.zero_grad()
        loss_of(found).backward()
        loss_of(expected).backward()
        for our_weights, their_weights in [leaves] if weights is not None else []:
            torch.testing.assert_close(our_weights.grad, their_weights.grad, rtol=1e-12, atol=1e-12)
        learned += frequency_scaled(ids, theirs.weight.grad) if by_frequency else theirs.weight.grad
    ps.clock()
    torch.testing.assert_close(ours.table.pull(range(NUM)) - before, learned, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_embeddings_give_and_learn_what_those_of_torch_do(ps: Session, seed: int) -> None:
    dice, torch_dice = random.Random(seed), torch.Generator().manual_seed(seed)
    settings = {"padding_idx": dice.choice([None, 3, -1]), "scale_grad_by_freq": dice.random() < 0.5}
    ours = paceline.Embedding(NUM, WIDTH, update=paceline.update.Add(), dtype=torch.float64, ps=ps, **settings)
    theirs = nn.Embedding(NUM, WIDTH, dtype=torch.float64, **settings)
    like(ours, theirs)
    before = ours.table.pull(range(NUM))
    for _ in range(dice.randint(1, 3)):
        shape = [dice.randint(0, 4) for _ in range(dice.randint(0, 3))]
        ids = torch.randint(dice.choice([4, NUM]), shape, generator=torch_dice)
        found, expected = ours(ids), theirs(ids)
        assert torch.equal(found, expected)
        loss_of(found).backward()
        loss_of(expected).backward()
    ps.clock()
    torch.testing.assert_close(ours.table.pull(range(NUM)) - before, theirs.weight.grad, rtol=1e-12, atol=1e-12)


def test_a_bag_divides_gradients_by_the_frequency_of_their_own_rows(ps: Session) -> None:
    ours = paceline.EmbeddingBag(
        None, 1, scale_grad_by_freq=True, mode="sum", update=paceline.update.Add(), init=0.0, ps=ps
    )
    ours(torch.tensor([[3, 5, 3, 1], [5, 5, 2, 0]])).sum().backward()
    ps.clock()
    assert ours.table.pull([0, 1, 2, 3, 5]).view(-1).tolist() == [1.0] * 5


def test_without_a_number_of_embeddings_any_id_has_a_row(ps: Session) -> None:
    ours = paceline.Embedding(None, WIDTH, -1, update=SGD, init=1.0, ps=ps)
    ids = torch.tensor([2**63 - 1, -(2**63), -1, 0])
    ours(ids).sum().backward()
    ps.clock()
    assert ours(ids)[:, 0].tolist() == [0.5, 0.5, 0.0, 0.5]
    assert ours.table.pull(-1).tolist() == [1.0] * WIDTH  # never pushed: the zeros are the module's


def test_first_values_are_like_those_of_torch_and_differ_from_table_to_table(ps: Session) -> None:
    one, two = (paceline.Embedding(None, 16, update=SGD, name=name, ps=ps)(torch.arange(1000)) for name in "ab")
    for rows in (one, two):
        assert abs(rows.mean()) < 0.03
        assert abs(rows.std() - 1) < 0.03
    assert not torch.equal(one, two)


def test_rows_have_the_type_that_was_asked_for(ps: Session) -> None:
    ours = paceline.Embedding(None, 2, update=SGD, init=1.0, dtype=torch.float64, ps=ps)
    ours(torch.tensor([1])).sum().backward()
    ps.clock()
    assert torch.equal(ours(torch.tensor([1])), torch.full((1, 2), 0.5, dtype=torch.float64))


# -- what is collected -----------------------------------------------------------------------------------------------


def pushed(ps: Session, act: Callable[[paceline.Embedding], None]) -> tuple[list[float], int]:
    """Return the first numbers of rows 0, 1 and 2 after `act` and a clock, and the number of messages it took."""
    ours = paceline.Embedding(3, 2, update=SGD, init=0.0, ps=ps)
    act(ours)
    ps.clock()
    ours.table.pull([0, 1, 2])
    return ours.table.pull([0, 1, 2])[:, 0].tolist(), ours.table.traffic.pushed.frames


def test_several_backwards_and_forwards_are_one_push(ps: Session) -> None:
    def act(ours: paceline.Embedding) -> None:
        ours(torch.tensor([0, 1, 0])).sum().backward()
        loss = ours(torch.tensor([0])).sum() + ours(torch.tensor([1])).sum()
        loss.backward(retain_graph=True)
        loss.backward()

    assert pushed(ps, act) == ([-2.0, -1.5, 0.0], 1)


def without_gradients(ours: paceline.Embedding) -> None:
    with torch.no_grad():
        assert not ours(torch.tensor([0])).requires_grad
    with torch.inference_mode():
        ours.eval()(torch.tensor([0, 0]))


def without_backward(ours: paceline.Embedding) -> None:
    ours(torch.tensor([0]))


def zeroed_by_hand(ours: paceline.Embedding) -> None:
    ours(torch.tensor([0])).sum().backward()
    ours.zero_grad()


def frozen_from_above(ours: paceline.Embedding) -> None:
    """By modules that have it inside; training mode and walks over parameters change nothing."""
    model = nn.Sequential(nn.ModuleDict({"rows": ours, "dense": nn.Linear(WIDTH, 1)}), nn.Linear(1, 1))
    assert model.requires_grad_(False) is model
    assert not ours(torch.tensor([0])).requires_grad
    model.train()
    assert len([parameter.requires_grad_(True) for parameter in model.parameters()]) == 4
    assert list(ours.parameters()) == [] == list(ours.state_dict())
    assert not copy.deepcopy(model)[0]["rows"](torch.tensor([0])).requires_grad
    copy.deepcopy(model).requires_grad_(True)
    assert not ours(torch.tensor([0])).requires_grad
    model.requires_grad_(True)
    assert ours(torch.tensor([0])).requires_grad
    model.requires_grad_(requires_grad=False)
    assert not ours(torch.tensor([0])).requires_grad


@pytest.mark.parametrize("act", [without_gradients, without_backward, zeroed_by_hand, frozen_from_above])
def test_nothing_is_pushed(ps: Session, act: Callable[[paceline.Embedding], None]) -> None:
    assert pushed(ps, act) == ([0.0, 0.0, 0.0], 0)


def frozen(ours: paceline.Embedding) -> None:
    assert not ours.requires_grad_(False)(torch.tensor([0])).requires_grad
    whole = nn.Sequential(ours, nn.Linear(2, 1)).requires_grad_(True)
    whole.apply(lambda module: module.requires_grad_(False))
    assert not whole(torch.tensor([0])).requires_grad


def test_what_is_frozen_does_not_learn(ps: Session) -> None:
    assert pushed(ps, frozen) == ([0.0, 0.0, 0.0], 0)


def test_what_is_frozen_learns_again_when_it_is_let(ps: Session) -> None:
    def act(ours: paceline.Embedding) -> None:
        (ours.requires_grad_(False)(torch.tensor([0])) * torch.ones(2, requires_grad=True)).sum().backward()
        ours.requires_grad_()(torch.tensor([1])).sum().backward()

    assert pushed(ps, act) == ([0.0, -0.5, 0.0], 1)


def test_a_copy_has_the_same_rows_learns_in_the_same_push_and_is_frozen_by_itself(ps: Session) -> None:
    def act(ours: paceline.Embedding) -> None:
        other = copy.deepcopy(nn.Sequential(ours))[0]
        assert isinstance(other, paceline.Embedding)
        assert other.table is ours.table
        other(torch.tensor([0, 1])).sum().backward()
        ours(torch.tensor([0])).sum().backward()
        other.requires_grad_(False)
        assert ours(torch.tensor([0])).requires_grad

    assert pushed(ps, act) == ([-1.0, -0.5, 0.0], 1)


def test_a_gradient_that_is_not_finite_is_refused_and_counted(ps: Session) -> None:
    ours = paceline.Embedding(3, 2, update=SGD, init=0.0, ps=ps)
    (ours(torch.tensor([0])) * torch.inf).sum().backward()
    ps.clock()
    assert ours.num_refused == 1
    assert ours(torch.tensor([0])).tolist() == [[0.0, 0.0]]


# -- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [[0, NUM], [-1], [2**40]])
def test_ids_out_of_range_raise_as_in_torch(ps: Session, ids: list[int]) -> None:
    ours = paceline.Embedding(NUM, WIDTH, update=SGD, name="users", ps=ps)
    with pytest.raises(IndexError, match="out of range"):
        nn.Embedding(NUM, WIDTH)(torch.tensor(ids))
    for act in (ours, ours.prefetch):
        with pytest.raises(IdOutOfRange, match=r"table 'users': id -?\d+ is out of range: there are 20"):
            act(torch.tensor(ids))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_norm": 1.0}, "max_norm is 1.0, but a lookup does not change rows"),
        ({"padding_idx": NUM}, "padding_idx is 20, expected an id below 20"),
        ({"padding_idx": -NUM - 1}, "padding_idx is -21"),
        ({"num_embeddings": 0}, "num_embeddings is 0, expected 1 or more, or None"),
        ({"embedding_dim": 0}, "its rows have 0 numbers"),
        ({"update": "sgd"}, "update is 'sgd', expected one of paceline.update"),
        ({"dtype": torch.int64}, "dtype is 'int64', expected one of"),
        ({"mode": "median"}, "mode is 'median', expected one of sum, mean, max"),
        ({"mode": "max", "scale_grad_by_freq": True}, "scale_grad_by_freq goes with the modes 'sum' and 'mean'"),
    ],
)
def test_settings_that_make_no_sense_are_refused_and_leave_no_table(ps: Session, settings: dict, message: str) -> None:
    module = paceline.EmbeddingBag if "mode" in settings else paceline.Embedding
    fine = {"num_embeddings": NUM, "embedding_dim": WIDTH, "update": SGD, "ps": ps}
    with pytest.raises(UsageError, match=message):
        module(**{**fine, **settings})
    if "max_norm" in settings:
        module(**fine)


def test_floating_ids_are_refused(ps: Session) -> None:
    ours = paceline.Embedding(NUM, WIDTH, update=SGD, ps=ps)
    for ids in (torch.ones(2), torch.tensor([True])):
        with pytest.raises(UsageError, match=r"table 'embedding', .*ids are torch.\w+, expected integers"):
            ours(ids)


def test_a_weight_can_be_neither_shared_nor_set_and_the_error_says_what_to_do(ps: Session) -> None:
    ours, head = paceline.Embedding(NUM, WIDTH, update=SGD, name="words", ps=ps), nn.Linear(WIDTH, NUM)
    message = r"table 'words': the rows .* live on the servers.*tie an output layer.*torch.nn.Embedding"
    with pytest.raises(NoWeight, match=message):
        head.weight = ours.weight
    with pytest.raises(NoWeight, match=message):
        ours.weight = head.weight
    assert not hasattr(ours, "weight")
    with pytest.raises(AttributeError, match="no attribute 'bias'"):
        _ = ours.bias


def test_a_layer_is_not_pickled_and_the_error_says_what_to_do(ps: Session) -> None:
    with pytest.raises(UsageError, match=r"table 'words': .* cannot be pickled. .*table.export"):
        pickle.dumps(paceline.Embedding(NUM, WIDTH, update=SGD, name="words", ps=ps))


def test_modules_without_names_have_tables_of_their_own(ps: Session) -> None:
    layers = [kind(NUM, WIDTH, update=SGD, ps=ps) for kind in (paceline.Embedding, paceline.EmbeddingBag)]
    assert [layer.table.name for layer in layers] == ["embedding", "embedding-2"]


def test_modules_of_one_name_train_the_same_rows_in_one_push(ps: Session) -> None:
    first, second = (paceline.Embedding(NUM, 1, update=SGD, init=0.0, name="words", ps=ps) for _ in range(2))
    for layer in (first, second):
        layer(torch.tensor([3])).sum().backward()
    ps.clock()
    assert first(torch.tensor([3])).item() == second(torch.tensor([3])).item() == -2 * SGD.groups[0]["lr"]
    with pytest.raises(UsageError, match=r"'words' has a layer with num_embeddings=\d+ and padding_idx=None, and this"):
        paceline.Embedding(NUM + 1, 1, update=SGD, init=0.0, name="words", ps=ps)


def test_a_model_does_not_see_the_rows_and_says_where_they_are(ps: Session) -> None:
    model = nn.Sequential(paceline.Embedding(None, 2, 0, update=SGD, consistency="ssp:2", name="users", ps=ps))
    assert list(model.parameters()) == []
    assert model.state_dict() == {}
    assert "Embedding(None, 2, padding_idx=0, table='users', ssp:2)" in str(model)


def test_the_pushes_of_all_layers_of_a_clock_leave_together(ps: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [paceline.Embedding(None, WIDTH, update=SGD, init=0.0, ps=ps) for _ in range(12)]
    torch.stack([layer(torch.tensor([7, 7])) for layer in layers]).sum().backward()
    sent: list[int] = []
    try_send = MemoryConnection.try_send

    def counted(self: MemoryConnection, frames: Sequence[tuple[bytes, memoryview]], *, timeout_s: float) -> bool:
        sent.extend(len(said.row_pushes) for header, _ in frames if isinstance(said := decode(header), StepFrame))
        return try_send(self, frames, timeout_s=timeout_s)

    monkeypatch.setattr(MemoryConnection, "try_send", counted)
    ps.clock()
    assert sent == [len(layers)]
    assert all(layer(torch.tensor([7])).eq(-1.0).all() for layer in layers)


def test_a_wait_among_calls_that_send_together_sends_what_it_may_wait_for(ps: Session) -> None:
    table = ps.table("r", rows=1, update=paceline.update.Add(), consistency="asynchronous")
    with ps.node.together():  # more pushes than may be unanswered at a time
        pushed = [table.push([7], [[1.0]]) for _ in range(3 * MAX_UNDER_WAY)]
        assert table.pull([7]).tolist() == [[3.0 * MAX_UNDER_WAY]]
    assert all(each.result(timeout=30).applied for each in pushed)
