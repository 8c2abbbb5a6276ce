"""Four ranks that split models between them, each compared with the whole model in the same process.

Called with a folder of their own, and perhaps the name of one check; each rank prints the checks that passed.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.model_parallel.models import LENGTH, NUM_WORDS, WIDTH, Block, Gpt, next_word_loss
from tests.model_parallel.ranks import fork_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from paceline.errors import UsageError
from paceline.model_parallel.arrangement import whole
from paceline.model_parallel.sharded import gathered, shard_fully
from paceline.model_parallel.split_layers import SplitLayer, leave
from paceline.model_parallel.tensor import plain, split_loss, split_over, squared_norm, whole_state

NUM_RANKS = 4
others: list[DeviceMesh] = []  # of pairs of ranks, the one across those that checks are given
Batch = tuple[Tensor, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]


class Communication(TorchDispatchMode):
    """Counts the collective calls of torch inside, and the bytes of the tensors they are over."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.calls.append(func.name())
            self.num_bytes += sum(one.numel() * one.element_size() for one in args[0])
        return func(*args, **(kwargs or {}))


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def gradients(module: nn.Module, mesh: DeviceMesh) -> dict[str, Tensor]:
    """The gradients of the whole module; those of parameters that are not split must be the same bits everywhere."""
    cuts = {
        f"{path}.{name}": cut
        for path, layer in module.named_modules()
        if isinstance(layer, SplitLayer)
        for name, cut in layer.cuts.items()
    }
    found: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        parts = [torch.empty_like(parameter) for _ in range(mesh.size())]
        dist.all_gather(parts, parameter.grad.contiguous(), group=mesh.get_group())
        if name not in cuts:
            assert all(torch.equal(part, parts[0]) for part in parts), f"{name} differs between ranks"
        found[name] = cuts[name].whole(parts) if name in cuts else parts[0]
    return found


def learn(model: nn.Module, batch: Batch, loss_of: Loss) -> float:
    with split_loss():
        loss = plain(loss_of(model(batch[0]), batch[1]))
        loss.backward()
    return loss.item()


def agrees(whole: nn.Module, batch: Batch, loss_of: Loss, mesh: DeviceMesh, num_steps: int = 3) -> nn.Module:
    """Whether a split copy has the outputs, losses, gradients, norms and steps of the whole model; returns it."""
    split = copy.deepcopy(whole)
    if mesh.get_local_rank() > 0:
        for parameter in split.parameters():
            parameter.data.zero_()  # what counts is what the first rank has
    split_over(split, mesh)
    assert sum(map(Tensor.numel, split.parameters())) < sum(map(Tensor.numel, whole.parameters()))
    models = (whole, split)
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in models]
    for _ in range(num_steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected, found = (learn(model, batch, loss_of) for model in models)
        assert abs(expected - found) < 1e-10, (expected, found)
        own = gradients(split, mesh)
        for name, parameter in whole.named_parameters():
            assert parameter.grad is not None
            close(own[name], parameter.grad)
        norm = nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        split_norm = squared_norm(split, mesh).sqrt()
        assert abs(float(norm - split_norm)) < 1e-10
        for parameter in split.parameters():
            if parameter.grad is not None and split_norm > 0.5:
                parameter.grad.mul_(0.5 / (float(split_norm) + 1e-6))
        for optimizer in optimizers:
            optimizer.step()
    state = whole_state(split, mesh)
    assert list(state) == list(whole.state_dict())
    for name, tensor in whole.state_dict().items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-8, atol=1e-8)
    with torch.no_grad():
        torch.testing.assert_close(split.eval()(batch[0]), whole.eval()(batch[0]), rtol=1e-8, atol=1e-8)
    return split.train()


def words() -> Batch:
    drawn = torch.Generator().manual_seed(5)
    ids = torch.randint(NUM_WORDS, (3, LENGTH + 1), generator=drawn)
    return ids[:, :-1], ids[:, 1:]


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def check_chain(mesh: DeviceMesh) -> None:
    chain = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4), nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    agrees(chain, (torch.randn(5, 3), torch.randn(5, 2)), squares, mesh)


def check_bias_is_added_once(mesh: DeviceMesh) -> None:
    """A rank that adds the bias before the sum is what the other checks would notice."""
    chain = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    inputs = torch.randn(5, 3)
    expected = chain(inputs)
    split_over(chain, mesh)
    close(chain(inputs), expected)
    layer = chain[2]
    mistaken = leave(nn.functional.linear(chain[:2](inputs), layer.weight, layer.bias), layer.share)
    close(mistaken - expected, (mesh.size() - 1) * layer.bias.expand(5, 2))


def check_gpt(mesh: DeviceMesh) -> None:
    for tied in (False, True):
        split = agrees(Gpt(tied=tied), words(), next_word_loss, mesh)
        assert split.get_parameter("words.weight").shape == (NUM_WORDS // mesh.size(), WIDTH)
        with pytest.raises(IndexError, match="rows 0 to 15"):
            split(torch.full((1, 2), NUM_WORDS))


def check_torch_layers(mesh: DeviceMesh) -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 16, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2)
    x, targets = torch.randn(2, LENGTH, WIDTH), torch.randn(2, LENGTH, WIDTH)
    agrees(encoder, (x, targets), squares, mesh)
    split = copy.deepcopy(encoder)
    split_over(split, mesh)
    padding = torch.zeros(2, LENGTH, dtype=torch.bool)
    padding[1, 4:] = True
    causal = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=torch.float64)
    with torch.no_grad():
        for training in (True, False):
            masks = {"mask": causal, "src_key_padding_mask": padding.double().masked_fill(padding, float("-inf"))}
            expected, found = (one.train(training)(x, **masks) for one in (encoder, split))
            close(found[~padding], expected[~padding])


def check_number_of_sums(mesh: DeviceMesh) -> None:
    for stacked in (True, False):
        block = Block(stacked)
        split_over(block, mesh)
        x = torch.randn(2, LENGTH, WIDTH, requires_grad=True)
        with Communication() as forward:
            outputs = block(x)
        with Communication() as backward:
            outputs.sum().backward()
        assert forward.calls == ["c10d::allreduce_"] * 2, forward.calls
        assert backward.calls == ["c10d::allreduce_"] * 2, backward.calls
        tensor_bytes = x.numel() * x.element_size()
        assert (forward.num_bytes, backward.num_bytes) == (2 * tensor_bytes, 2 * tensor_bytes)


def check_dropout(mesh: DeviceMesh) -> None:
    chain = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 4), nn.Dropout(0.5))
    with torch.no_grad():
        chain[0].bias.fill_(1.0)
    torch.manual_seed(dist.get_rank())  # ranks that are seeded differently draw together all the same
    split_over(chain, mesh)
    dropped: list[Tensor] = []
    chain[1].register_forward_hook(lambda _, inputs, outputs: dropped.append((outputs == 0).double()))
    outputs = chain(torch.zeros(8, 4))
    for tensor, same in ((outputs.detach(), True), (dropped[-1], False)):
        parts = [torch.empty_like(tensor) for _ in range(mesh.size())]
        dist.all_gather(parts, tensor, group=mesh.get_group())
        assert torch.equal(parts[0], parts[1]) is same


def check_recomputation(mesh: DeviceMesh) -> None:
    block = Gpt(tied=False, dropout=0.3).blocks
    model = nn.Sequential(*block)
    split_over(model, mesh)
    found: list[list[Tensor | None]] = []
    x = torch.randn(2, LENGTH, WIDTH)
    for again in (False, True):
        torch.manual_seed(1)
        model.zero_grad()
        entering = x.clone().requires_grad_()
        outputs = checkpoint(model, entering, use_reentrant=False) if again else model(entering)
        outputs.square().sum().backward()
        found.append([entering.grad, *(parameter.grad for parameter in model.parameters())])
    for first, second in zip(*found, strict=True):
        assert first is not None
        assert second is not None
        close(second, first)


def check_half_precision(mesh: DeviceMesh) -> None:
    chain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).bfloat16()
    expected = chain(torch.ones(1, 4, dtype=torch.bfloat16))
    split_over(chain, mesh)
    torch.testing.assert_close(chain(torch.ones(1, 4, dtype=torch.bfloat16)), expected, rtol=0.05, atol=0.05)


def check_rows_without_columns(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    split_over(model, mesh, {"1": "column", "0": "row"})
    with pytest.raises(UsageError, match="layer '0' is split by rows: expected"):
        model(torch.ones(1, 8))


class Pair(nn.Module):
    """Two layers that are called by the usual names, with something between them that the names do not tell."""

    def __init__(self, between: Callable[[nn.Module, Tensor], Tensor], width: int = 8) -> None:
        super().__init__()
        self.fc1, self.fc2, self.between = nn.Linear(4, width), nn.Linear(width, 3), between
        self.norm = nn.LayerNorm(width)
        with torch.no_grad():
            self.fc2.weight.zero_()  # so that outputs alone would not tell
            self.fc1.bias.fill_(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.between(self, self.fc1(x)))


class Aside(Pair):
    """What comes out of the first layer goes past the second one, too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.fc1(x).mean(-1, keepdim=True)


MIXES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "softmax": lambda _, x: x.softmax(-1),
    "mean": lambda _, x: x - x.mean(-1, keepdim=True),
    "cumulated": lambda _, x: x.cumsum(-1),
    "reversed": lambda _, x: x.flip(-1),
    "normed": lambda model, x: model.norm(x),
    "dropped": lambda _, x: nn.functional.dropout(x.softmax(-1), 0.5),
    "weighed by hand": lambda model, x: nn.functional.linear(x[..., :4].sigmoid(), model.fc1.weight) + x,
}


def check_names_are_no_proof(mesh: DeviceMesh) -> None:
    """What mixes features is refused on every rank at the first call, and what does not is as the whole."""
    inputs = torch.randn(5, 4)
    for model in (*map(Pair, MIXES.values()), Aside(lambda _, x: x.relu())):
        split_over(model, mesh)
        for _ in range(2):
            with pytest.raises(UsageError, match=r"'the model', a \w+, cannot be split by its layers fc1, fc2"):
                model(inputs)
        with torch.no_grad(), pytest.raises(UsageError, match="name those to split in a tensor_plan"):
            model.eval()(inputs)
    for kept in (lambda _, x: x.sin() * x.relu(), lambda model, x: nn.functional.dropout(x, 0.5, model.training)):
        model = Pair(kept).eval()
        nn.init.ones_(model.fc2.weight)
        expected = model(inputs)
        split_over(model, mesh)
        for training in (True, False):
            found = model.train(training)(inputs)
        close(found, expected)
    split = Pair(lambda _, x: x)
    split_over(split, mesh)
    with pytest.raises(UsageError, match="layer 'fc1' is split together with others, but was called without"):
        split.fc1(inputs)


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def check_subclasses_and_hooks(mesh: DeviceMesh) -> None:
    """A layer that computes more than torch's own class stays whole, and so does the other one of its pair."""
    chain = nn.Sequential(
        *(Doubled(3, 8), nn.Tanh(), nn.Linear(8, 4), nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4), nn.Linear(4, 8)),
        *(nn.Softmax(-1), nn.Linear(8, 2)),
    )
    chain[6].register_forward_hook(lambda _, inputs, outputs: 3 * outputs)
    split = agrees(chain, (torch.randn(5, 3), torch.randn(5, 2)), squares, mesh)
    assert [name for name, one in split.named_modules() if isinstance(one, SplitLayer)] == ["2", "3"]


def check_sharded(mesh: DeviceMesh) -> None:
    """Each rank with a batch of its own, once with whole layers and once, where there are pairs, with split ones."""
    ids, targets = (tensor.repeat(4, 1)[: 2 * mesh.size()] for tensor in words())
    own = slice(2 * mesh.get_local_rank(), 2 * mesh.get_local_rank() + 2)
    for split_too in (False, True) if mesh.size() < NUM_RANKS else (False,):
        model = Gpt(tied=split_too)
        sharded = copy.deepcopy(model)
        if split_too:
            split_over(sharded, others[0])
        shard_fully(sharded, mesh)
        assert sum(isinstance(module, FSDPModule) for module in sharded.modules()) == 3  # two blocks and the rest
        optimizers = [torch.optim.Adam(one.parameters(), lr=0.01) for one in (model, sharded)]
        for _ in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            learn(model, (ids, targets), next_word_loss)
            learn(sharded, (ids[own], targets[own]), next_word_loss)
            for (name, one), expected in zip(sharded.named_parameters(), model.parameters(), strict=True):
                if not split_too:
                    assert isinstance(one.grad, DTensor)
                    assert one.grad.to_local().numel() < one.numel(), name
                    close(one.grad.full_tensor(), expected.grad)
            for optimizer in optimizers:
                optimizer.step()
        state = whole_state(sharded, others[0]) if split_too else sharded.state_dict()
        for name, expected in model.state_dict().items():
            torch.testing.assert_close(whole(state[name]), expected, rtol=1e-9, atol=1e-9)
        with gathered(sharded), torch.no_grad():
            close(sharded(ids[:1]), model(ids[:1]))


def live(directory: Path, wanted: str, rank: int) -> None:
    torch.set_default_dtype(torch.float64)
    store = dist.FileStore(str(directory / "ranks.store"), NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS, timeout=timedelta(seconds=200))
    four, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    others.append(grid["data"])
    for name, check in sorted(globals().items()):
        if name.startswith("check_") and name.endswith(wanted):
            for mesh in (four, grid["tensor"]):
                torch.manual_seed(0)
                check(mesh)
            print("passed", name, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    own = Path(sys.argv[1])
    fork_ranks(own, NUM_RANKS, partial(live, own, sys.argv[2] if len(sys.argv) > 2 else ""))
