"""A language model split over two ranks, in one stage or two: losses of all kinds are those of one process."""

import copy
import sys
from pathlib import Path

import torch
from models import EXACT
from torch import Tensor, nn
from torch.nn import functional

import paceline

sys.path.append(str(Path(__file__).parents[3]))
from tests.model_parallel.models import NUM_WORDS, Gpt

paceline.init()
torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)


class Row(Gpt):
    """A GPT that says which layers it has, without places."""

    def layers(self) -> list[nn.Module]:
        return [self.words, *self.blocks, self.norm, self.head]

    def forward(self, ids: Tensor) -> Tensor:
        for layer in self.layers():
            ids = layer(ids)
        return ids


def built(*, tied: bool) -> nn.Module:
    torch.manual_seed(1)
    model = Row(tied=tied)
    del model.places
    return model


def entropy(**options: object):  # noqa: ANN201
    return lambda scores, targets: functional.cross_entropy(scores.flatten(0, 1), targets.flatten(), **options)


drawn = torch.Generator().manual_seed(0)
ids = torch.randint(NUM_WORDS, (8, 5), generator=drawn)
targets = ids.roll(1, 1)
targets[0] = targets[5] = targets[1, 2:] = -100
weight = torch.rand(NUM_WORDS, generator=drawn)
CASES = {
    "mean": (entropy(), None),
    "said": (entropy(), lambda targets: (targets >= 0).sum()),
    "sum": (entropy(reduction="sum"), "sum"),
    "weights": (entropy(weight=weight), None),
    "smoothed": (entropy(label_smoothing=0.1), None),
    "mixed": (lambda scores, targets: entropy()(scores, targets) + 0.1 * scores.log_softmax(-1).mean(), None),
    "surprise": (lambda scores, _: -(scores.softmax(-1) * scores.log_softmax(-1)).sum(-1).mean(), None),
    "each": (lambda *both: functional.cross_entropy(both[0].mT, both[1], reduction="none").square().mean(), None),
    "by hand": (lambda *both: functional.nll_loss(both[0].log_softmax(-1).flatten(0, 1), both[1].flatten()), None),
}

for name, (loss, reduction) in CASES.items():
    for tied in (False, True) if paceline.size() == 2 else (False,):
        whole = built(tied=tied)
        part = paceline.parallelize(copy.deepcopy(whole), loss=loss, micro_batches=4, reduction=reduction)
        assert part.get_parameter("words.weight" if paceline.rank() < 2 else "head.weight").shape[0] == NUM_WORDS // 2
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9) for model in (whole, part)]
        for _ in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            expected = loss(whole(ids), targets)
            expected.backward()
            assert abs(part.forward_backward(ids, targets) - expected.item()) < 1e-9, name
            norm = nn.utils.clip_grad_norm_(whole.parameters(), 1.0).item()
            assert abs(part.clip_gradients(1.0) - norm) < 1e-9, name
            for optimizer in optimizers:
                optimizer.step()
        told = part.whole_state_dict()
        if told is not None:
            torch.testing.assert_close(told, dict(whole.state_dict()), **EXACT)
    print(f"equal {name}")
