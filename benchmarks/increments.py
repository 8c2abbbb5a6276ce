"""What an increment of a dense table saves: what of a model is the same after some steps, and what sending costs.

    python benchmarks/increments.py [--json] [--steps 100] [--rounds 5]

Small models are trained in this process: a perceptron on scikit-learn's digits, a transformer on the text of this
project's pages, letter by letter, and a regression on the hashed words of their lines, which tells pages apart and
whose inputs are mostly zeros. Their values after `--steps` steps are compared with those of 1, 4 and 16 steps later, as
float32 and as bfloat16 made of these:

- how many chunks of a mebibyte, and how many elements, are the same, bit for bit;
- the bytes that are sent, in those of all values, and the processor time of encoding and, where it is one that readers
  use, of decoding, in ms a megabyte of values: by deltas (`words`), by what `paceline.subscribe(compress=True)` has
  beside them (`difference`), and by the same with zlib's own search, with lz4 and with zstd in the place of runs.

A megabyte takes 8.0 ms at 1 Gbit/s, and 0.8 ms at 10.
"""

import argparse
import statistics
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import pyarrow as pa
import torch
from measuring import machine, print_json, progress
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

from paceline.update.dtypes import dtype_name
from paceline.wire.deltas import WordBytes, apply_delta, apply_difference, encode_delta, encode_difference
from paceline.wire.versions import CHUNK_BYTES

PAGES: Final = Path(__file__).resolve().parent.parent / "docs"
DISTANCES: Final = (1, 4, 16)
PIECE_BYTES: Final = 4 * CHUNK_BYTES  # that a reader asks for at once
Loss = Callable[[], Tensor]


# -- what is trained -------------------------------------------------------------------------------------------------


def digits() -> tuple[nn.Module, Loss]:
    """Return a perceptron, and its loss on the next batch of digits."""
    data: Any = load_digits()
    images, labels = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))

    def loss() -> Tensor:
        batch = torch.randint(len(labels), (64,))
        return functional.cross_entropy(model(images[batch]), labels[batch])

    return model, loss


class Letters(nn.Module):
    """A transformer that says which letter comes next."""

    def __init__(self, width: int = 128, num_layers: int = 4, context: int = 64) -> None:
        super().__init__()
        self.context = context
        self.letters = nn.Embedding(256, width)
        self.places = nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.said = nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        """Return what comes after each letter, (batch, context, 256), as logits."""
        hidden = self.letters(text) + self.places.weight
        mask = nn.Transformer.generate_square_subsequent_mask(self.context)
        return self.said(self.layers(hidden, mask=mask, is_causal=True))


def transformer() -> tuple[nn.Module, Loss]:
    """Return a transformer, and its loss on the next batch of text."""
    text = torch.frombuffer(bytearray("".join(page.read_text() for page in pages()).encode()), dtype=torch.uint8).long()
    model = Letters()

    def loss() -> Tensor:
        starts = torch.randint(len(text) - model.context - 1, (16, 1))
        batch = text[starts + torch.arange(model.context + 1)]
        return functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    return model, loss


def regression() -> tuple[nn.Module, Loss]:
    """Return a regression from words to pages, and its loss on the next batch of lines."""
    lines = [(line.split(), at) for at, page in enumerate(pages()) for line in page.read_text().splitlines() if line]
    num_words = 1 << 14
    words = [torch.tensor([zlib.crc32(word.encode()) % num_words for word in line]) for line, _ in lines]
    labels = torch.tensor([at for _, at in lines])
    # The weight of an EmbeddingBag that sums is that of a linear layer whose inputs are counts of words.
    model = nn.EmbeddingBag(num_words, len(pages()), mode="sum")
    nn.init.zeros_(model.weight)

    def loss() -> Tensor:
        batch = torch.randint(len(labels), (64,))
        chosen = [words[at] for at in batch.tolist()]
        starts = torch.tensor([0, *(len(each) for each in chosen[:-1])]).cumsum(0)
        return functional.cross_entropy(model(torch.cat(chosen), starts), labels[batch])

    return model, loss


def pages() -> list[Path]:
    """Return the pages of this project."""
    return sorted(PAGES.glob("*.md"))


MODELS: Final = {"perceptron": digits, "transformer": transformer, "sparse regression": regression}
RULES: Final[dict[str, Callable[..., torch.optim.Optimizer]]] = {
    "SGD 0.05": partial(torch.optim.SGD, lr=0.05),
    "momentum 0.9": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "Adam 1e-3": partial(torch.optim.Adam, lr=1e-3),
    "Adam 1e-6": partial(torch.optim.Adam, lr=1e-6),  # as language models are trained by rewards
}


def versions(model: str, rule: str, steps: int) -> list[Tensor]:
    """Train, and return the values after `steps` steps and after each of the distances more: float32, in one row."""
    torch.manual_seed(0)
    module, loss = MODELS[model]()
    # Small steps are those of a model that is trained already: the first half is made by larger ones.
    warm = RULES["Adam 1e-3"](module.parameters())
    optimizer = RULES[rule](module.parameters())
    found: list[Tensor] = []
    for step in range(steps + max(DISTANCES) + 1):
        if step in (steps, *(steps + distance for distance in DISTANCES)):
            found.append(nn.utils.parameters_to_vector(module.parameters()).detach().clone())
        used = warm if rule == "Adam 1e-6" and step < steps // 2 else optimizer
        used.zero_grad()
        loss().backward()
        used.step()
    return found


# -- how it is sent --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Way:
    """A way to send what has changed: `decode` undoes `encode`; both take what was before, and bytes of a word."""

    encode: Callable[[memoryview, memoryview, WordBytes], Any]  # None: as it is
    size_of: Callable[[Any], int]
    decode: Callable[[Any, WordBytes, memoryview], None] | None = None


def compressed(compress: Callable[[bytes], bytes]) -> Way:
    """Return a way by XOR, bytes sorted by their place in a word, and a compressor."""

    def encode(base: memoryview, new: memoryview, word_bytes: WordBytes) -> list[bytes]:
        difference = np.frombuffer(base, np.uint8) ^ np.frombuffer(new, np.uint8)
        return [compress(place.tobytes()) for place in difference.reshape(-1, word_bytes).T]

    return Way(encode, lambda found: sum(map(len, found)))


def codec(name: str, level: int | None = None) -> Callable[[bytes], bytes]:
    """Return one of pyarrow's compressors."""
    found = pa.Codec(name, level)
    return lambda data: cast("bytes", found.compress(data, asbytes=True))


WAYS: Final[dict[str, Way]] = {
    "words": Way(
        encode_delta,
        lambda found: len(found[1]),
        lambda found, word_bytes, out: apply_delta(found[1], found[0], word_bytes, out),
    ),
    "difference": Way(encode_difference, len, apply_difference),
    "zlib 1": compressed(partial(zlib.compress, level=1)),
    "lz4": compressed(codec("lz4")),
    "zstd 1": compressed(codec("zstd", 1)),
}


@dataclass(slots=True)
class Sent:
    """What one way takes: the bytes, in those of all values, and processor time of both ends."""

    share: float
    encode_ms_per_mb: float
    decode_ms_per_mb: float | None

    @staticmethod
    def of(way: Way, base: memoryview, new: memoryview, word_bytes: WordBytes, rounds: int) -> "Sent":
        """Measure it, in pieces as readers ask for them; raises AssertionError if other bytes come out."""
        size_bytes, encoding, decoding = 0, list[float](), list[float]()
        for _ in range(rounds):
            size_bytes, encode_s, decode_s = 0, 0.0, 0.0
            for start in range(0, len(new), PIECE_BYTES):
                old, wanted = base[start : start + PIECE_BYTES], new[start : start + PIECE_BYTES]
                began_s = time.thread_time()
                found = way.encode(old, wanted, word_bytes)
                encode_s += time.thread_time() - began_s
                size_bytes += len(wanted) if found is None else way.size_of(found)
                if found is not None and way.decode is not None:
                    out = memoryview(bytearray(old))
                    began_s = time.thread_time()
                    way.decode(found, word_bytes, out)
                    decode_s += time.thread_time() - began_s
                    assert out == wanted
            encoding.append(encode_s)
            decoding.append(decode_s)
        ms_per_mb = 1e3 / (len(new) / 1e6)
        decode_ms = None if way.decode is None else ms_per_mb * statistics.median(decoding)
        return Sent(size_bytes / len(new), ms_per_mb * statistics.median(encoding), decode_ms)

    def __str__(self) -> str:
        times = (self.encode_ms_per_mb, self.decode_ms_per_mb)
        return f"{100 * self.share:.1f} % ({' + '.join(f'{each:.1f}' for each in times if each is not None)})"


@dataclass(frozen=True, slots=True)
class Increment:
    """What one version shares with an earlier one, and what it takes to send it."""

    model: str
    rule: str
    dtype: str
    steps: int
    size_bytes: int
    same_chunks: float
    same_elements: float
    sent: dict[str, Sent]

    @staticmethod
    def of(model: str, rule: str, steps: int, old: Tensor, new: Tensor, rounds: int) -> "Increment":
        """Compare two versions."""
        word_bytes = cast("WordBytes", new.element_size())
        base, now = (each.view(torch.uint8).numpy().data for each in (old, new))
        words = [np.frombuffer(each, dtype=f"<u{word_bytes}") for each in (base, now)]
        starts = range(0, len(now), CHUNK_BYTES)
        same_chunks = [base[start : start + CHUNK_BYTES] == now[start : start + CHUNK_BYTES] for start in starts]
        sent = {name: Sent.of(way, base, now, word_bytes, rounds) for name, way in WAYS.items()}
        same = float(np.mean(words[0] == words[1]))
        dtype = dtype_name(new.dtype)
        return Increment(model, rule, dtype, steps, len(now), float(np.mean(same_chunks)), same, sent)

    def __str__(self) -> str:
        same = f"{100 * self.same_chunks:.0f} % | {100 * self.same_elements:.1f} %"
        ways = " | ".join(map(str, self.sent.values()))
        return f"| {self.model}, {self.rule} | {self.dtype} | {self.steps} | {same} | {ways} |"


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    progress(f"increments of dense tables on {machine()}")
    found = list[Increment]()
    if not options.json:
        print(f"| trained by | values | steps | same chunks | same elements | {' | '.join(WAYS)} |")
        print("|---" * (5 + len(WAYS)) + "|")
    for model, rule in product(MODELS, RULES):
        first, *others = versions(model, rule, options.steps)
        for dtype, (steps, later) in product((torch.float32, torch.bfloat16), zip(DISTANCES, others, strict=True)):
            found.append(Increment.of(model, rule, steps, first.to(dtype), later.to(dtype), options.rounds))
            if not options.json:
                print(found[-1], flush=True)
    if options.json:
        print_json({"machine": machine(), "rows": [asdict(each) for each in found]})


if __name__ == "__main__":
    main()
