"""Models of two kinds, with what one process computes with them: outputs, gradients and what it learns."""

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional

EXACT = {"rtol": 0.0, "atol": 1e-10}
NUM_CLASSES = 5


class Block(nn.Module):
    """A residual block, as a layer with layers inside."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.inner(self.norm(x)))


class Masked(nn.Module):
    """A layer of two tensors: values, and which of them count."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, both: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, mask = both
        return torch.tanh(self.inner(x)) * mask[..., None], mask


class Pool(nn.Module):
    """The mean of the values that count."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.out = nn.Linear(width, NUM_CLASSES)

    def forward(self, both: tuple[Tensor, Tensor]) -> Tensor:
        x, mask = both
        return self.out(x.sum(1) / mask.sum(1, keepdim=True))


class Talker(nn.Module):
    """A model that says itself which layers it has."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.blocks = nn.ModuleList(Block(6) for _ in range(4))
        self.head = nn.Linear(6, 7)

    def layers(self) -> list[nn.Module]:
        return [self.embedding, *self.blocks, self.head]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def mlp(dropout: float = 0.0) -> nn.Module:
    layers = [nn.Linear(4, 8), nn.Tanh(), Block(8, dropout), Block(8, dropout), nn.Linear(8, 8), nn.Tanh()]
    return seeded(lambda: nn.Sequential(*layers[:4], nn.Sequential(*layers[4:]), nn.Linear(8, NUM_CLASSES)))


def convolutional() -> nn.Module:
    """AlexNet's shape: features, then a classifier, with pooling and flattening between."""
    features = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 3), nn.ReLU())
    classifier = nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, NUM_CLASSES))
    model = nn.Sequential()
    model.add_module("features", features)
    model.add_module("flatten", nn.Flatten())
    model.add_module("classifier", classifier)
    return seeded(lambda: model)


def seeded(make) -> nn.Module:  # noqa: ANN001
    model = make().double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model


def batch(num: int, *shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num, *shape, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, NUM_CLASSES, (num,), generator=generator)


def alone(model: nn.Module, inputs: object, targets: Tensor, loss=functional.cross_entropy) -> nn.Module:  # noqa: ANN001
    """Return a copy of the model with the gradients and, as attributes, what one process gets from the whole batch."""
    model = copy.deepcopy(model)
    outputs = model(inputs)
    found = loss(outputs, targets)
    found.backward()
    model.outputs, model.loss = outputs.detach(), float(found.detach())
    return model


def same_part(part: nn.Module, whole: nn.Module, *, gradients: bool = True) -> None:
    """Check that a part has the values, or the gradients, that the whole has under the same names."""
    expected = dict(whole.named_parameters())
    named = dict(part.named_parameters())
    assert named, "a part with nothing in it"
    for name, parameter in named.items():
        other = expected[name]
        found, wanted = (parameter.grad, other.grad) if gradients else (parameter.detach(), other.detach())
        torch.testing.assert_close(found, wanted, **EXACT, msg=lambda text, name=name: f"{name}: {text}")


def tokens_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
