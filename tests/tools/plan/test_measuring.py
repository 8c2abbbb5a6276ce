"""What is counted of a module: parameters, operations, and what autograd keeps."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from paceline.tools.plan.measuring import Sample, measured_model, units_of
from paceline.tools.plan.model import Model


def measure(make: Callable[[], nn.Module], shape: str, batch: int = 2, number_bytes: int = 4) -> Model:
    with torch.device("meta"):
        module = make()
    return measured_model("a model", module, Sample.parse(shape), batch, number_bytes)


class Block(nn.Module):
    """Attention over two heads, and a perceptron."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.together = nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, values: Tensor) -> Tensor:
        parts = self.attention(self.norm(values)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        found = scaled_dot_product_attention(*parts, is_causal=True)
        values = values + self.together(found.transpose(1, 2).flatten(2))
        return values + self.perceptron(values)


class Tied(nn.Module):
    """Words, blocks, and a head of the words' matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.words.weight
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, ids: Tensor) -> Tensor:
        values = self.words(ids)
        for block in self.blocks:
            values = block(values)
        return self.head(values) * self.scale


def test_a_perceptron_by_hand() -> None:
    layers = measure(lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), "4").layers
    assert [layer.num_parameters for layer in layers] == [40, 0, 18]
    assert [layer.flops for layer in layers] == [2 * 4 * 8, 0, 2 * 8 * 2]
    # The first keeps its input, the second its output, and the third has that already.
    assert [layer.kept_bytes + layer.split_bytes for layer in layers] == [4 * 4, 8 * 4, 0]
    assert [layer.output_bytes for layer in layers] == [8 * 4, 8 * 4, 2 * 4]


def test_backward_computes_no_gradient_of_the_input() -> None:
    layers = measure(lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), "4").layers
    assert [layer.flops for layer in layers] == [64, 0, 32]
    assert [layer.input_flops for layer in layers] == [64, 0, 0]
    assert [layer.step_flops(3) for layer in layers] == [2 * 64, 0, 3 * 32]
    pairs = measure(lambda: nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 1)), "4").layers
    assert sum(layer.input_flops for layer in pairs) == 32
    assert not any(layer.input_flops for layer in measure(Tied, "3:ids").layers)


def test_numbers_have_the_size_of_the_precision_and_ids_keep_theirs() -> None:
    full, half = (measure(Tied, "6:ids", number_bytes=size) for size in (4, 2))
    assert full.input_bytes == half.input_bytes == 6 * 8
    assert full.layers[0].output_bytes == 2 * half.layers[0].output_bytes == 6 * 8 * 4
    assert full.layers[0].kept_bytes == 6 * 8  # the ids


def test_the_numbers_of_a_sample_are_those_of_any_batch() -> None:
    few, many = (measure(Tied, "6:ids", batch=batch) for batch in (2, 8))
    assert few == many


def test_layers_are_members_of_containers_and_shared_parameters_count_once() -> None:
    model = measure(Tied, "6:ids")
    assert [layer.name for layer in model.layers] == ["words", "blocks.0", "blocks.1", "head", "between the layers"]
    assert model.num_parameters == sum(parameter.numel() for parameter in Tied().parameters())
    assert model.layers[3].num_parameters == 0


def test_a_block_is_split_as_megatron_does() -> None:
    block = measure(Tied, "6:ids").layers[1]
    matrices = 8 * 24 + 8 * 8 + 2 * 8 * 32
    assert block.split_parameters == matrices
    assert block.num_all_reduces == 2
    assert block.flops == 2 * 6 * matrices + 2 * 2 * 6 * 6 * 8
    # Queries, keys and values in one, and the perceptron's inside before and after: 3 + 4 + 4 times the width.
    assert block.split_bytes >= 11 * 6 * 8 * 4


def test_attention_keeps_no_scores() -> None:
    """What is kept grows with the length, not with its square."""
    short, long = (measure(Tied, f"{length}:ids").layers[1] for length in (64, 128))
    assert long.kept_by(1) == pytest.approx(2 * short.kept_by(1))


def test_what_is_kept_is_what_a_real_run_keeps() -> None:
    torch.manual_seed(0)
    sizes = [16, 32, 32, 4]

    def make() -> nn.Module:
        return nn.Sequential(*[layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.Tanh())])

    module = make()
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(torch.randn(8, 16))
    real = sum(tensor.nbytes for tensor in kept.values() if not isinstance(tensor, nn.Parameter))
    own = {parameter.data_ptr() for parameter in module.parameters()}
    real = sum(tensor.nbytes for place, tensor in kept.items() if place not in own)
    model = measure(make, "16", batch=8)
    assert 8 * sum(layer.kept_by(1) for layer in model.layers) == real


def test_modules_within_modules_are_opened_down_to_the_layers() -> None:
    nested = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), Block(2)))
    assert [name for name, _ in units_of(nested)] == ["0", "1.0", "1.1"]
    assert [name for name, _ in units_of(nn.ModuleDict({"inside": Tied()}))] == [
        "inside.words",
        "inside.blocks.0",
        "inside.blocks.1",
        "inside.head",
    ]
