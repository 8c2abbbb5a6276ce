"""Word embeddings: skip-gram with negative sampling (Mikolov and others 2013), a row of each of two tables a word.

    python examples/word_embeddings.py
    paceline run --workers 4 --servers 2 examples/word_embeddings.py -- TEXT

TEXT is a file; without one, the words of Python's standard library are read. Each clock a worker pulls the rows of the
words in its batch, and pushes their gradients; the servers know by themselves how far to step (Adagrad).
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from library_text import library_words
from pictures import check_matplotlib
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize
from word_map import Neighbourhood, draw
from word_text import FREQUENT, Text, close_pairs, read_words

import paceline

WIDTH = 64
BATCH_WORDS = 2000
NUM_NEGATIVES = 5  # of each pair of words that stand close to each other
NUM_DRAWN = 200  # words that all pairs of a batch share as their negatives
RATE = 0.1
ASKED = ("thread", "socket", "integer", "month", "window", "directory")
NUM_NEIGHBOURS = 8


def batches(text: Text, ps: paceline.Session, epochs: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield the words of batch after batch of this worker's pieces, as many batches for every worker."""
    keep = np.minimum(1, np.sqrt(FREQUENT * text.counts.sum() / text.counts))
    num_batches = max(1, int((keep * text.counts).sum() / ps.size / BATCH_WORDS))
    own = text.pieces[ps.rank :: ps.size]
    for _ in range(epochs):
        words = np.concatenate([own[at] for at in rng.permutation(len(own))])
        yield from np.array_split(words[rng.random(len(words)) < keep[words]], num_batches)


def loss_of(
    centres: Tensor, contexts: Tensor, negatives: Tensor, num_pairs: Tensor, pairs: tuple[Tensor, Tensor]
) -> Tensor:
    """Return the sum of all pairs' losses.

    Args:
        centres: (c, width), rows of the distinct first words of pairs.
        contexts: (o, width), rows of the distinct second ones.
        negatives: (n, width), rows of words drawn by chance.
        num_pairs: (c,), of each first word.
        pairs: the places of both words of each pair in `centres` and `contexts`.
    """
    attracted = logsigmoid((centres[pairs[0]] * contexts[pairs[1]]).sum(1)).sum()
    weight = num_pairs * (NUM_NEGATIVES / len(negatives))  # as if each pair had a few of the negatives of its own
    return -attracted - (weight @ logsigmoid(-centres @ negatives.T)).sum()


def train(ps: paceline.Session, text: Text, options: Namespace) -> Tensor:
    """Return the vector of each word, (words, width)."""
    rng = np.random.default_rng([options.seed, ps.rank])
    rule, first = paceline.update.Adagrad(RATE), paceline.first.uniform(0.5 / WIDTH, seed=options.seed)
    centre_table = ps.table("centres", rows=WIDTH, update=rule, consistency=paceline.ssp(2), init=first)
    context_table = ps.table("contexts", rows=WIDTH, update=rule, consistency=paceline.ssp(2))
    chances = text.counts**0.75 / (text.counts**0.75).sum()
    loss = num_pairs = 0.0
    for clock, words in enumerate(batches(text, ps, options.epochs, rng)):
        firsts, seconds = close_pairs(words, rng)
        drawn = rng.choice(len(chances), NUM_DRAWN, p=chances)
        centre_ids, at_centre, repeats = np.unique(firsts, return_inverse=True, return_counts=True)
        context_ids, at_context = np.unique(np.concatenate([seconds, drawn]), return_inverse=True)
        centres = centre_table.pull(centre_ids).requires_grad_()
        contexts = context_table.pull(context_ids).requires_grad_()
        pairs = torch.from_numpy(at_centre), torch.from_numpy(at_context[: len(seconds)])
        negatives = contexts[torch.from_numpy(at_context[len(seconds) :])]
        lost = loss_of(centres, contexts, negatives, torch.from_numpy(repeats).float(), pairs)
        lost.backward()
        centre_table.push(centre_ids, centres.grad)
        context_table.push(context_ids, contexts.grad)
        ps.clock()
        loss, num_pairs = loss + lost.item(), num_pairs + len(firsts)
        if ps.rank == 0 and clock % 100 == 99:
            print(f"clock {clock + 1}: loss {loss / num_pairs:.3f} a pair")
            loss = num_pairs = 0.0
    ps.barrier()  # now all pushes of all workers are applied
    return centre_table.pull(np.arange(len(chances)), exact=True)


def neighbours(vectors: Tensor, word: int, number: int) -> tuple[list[int], list[float]]:
    """Return the words with the smallest angle to a word, and the cosines of these angles."""
    unit = normalize(vectors)
    cosines = unit @ unit[word]
    cosines[word] = -1
    best = cosines.topk(number)
    return best.indices.tolist(), best.values.tolist()


def asked_words(text: Text, asked: Sequence[str]) -> list[int]:
    """Return the numbers of the words to show; without any that the text has, some of those that are not rare."""
    found = [text.vocabulary.index(word) for word in asked if word in text.vocabulary]
    return found or list(range(0, len(text.vocabulary), max(1, len(text.vocabulary) // 8)))[:8]


def main() -> None:
    parser = ArgumentParser(description="Learn vectors of words as several workers.")
    parser.add_argument("text", nargs="?", type=Path, help="a file with words")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--min-count", type=int, default=10, help="leave out words that are there less often")
    parser.add_argument("--words", nargs="+", default=ASKED, help="words whose neighbours are shown")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--picture", type=Path, default=Path("words.png"))
    options = parser.parse_args()
    check_matplotlib()
    text = Text.of(library_words() if options.text is None else read_words(options.text), options.min_count)
    with paceline.connect() as ps:
        vectors = train(ps, text, options)
    if ps.rank == 0:
        show(text, vectors, options)


def show(text: Text, vectors: Tensor, options: Namespace) -> None:
    """Print the neighbours of words, and draw them."""
    shown: list[Neighbourhood] = []
    numbers: dict[int, None] = {}
    for word in asked_words(text, options.words):
        others, cosines = neighbours(vectors, word, NUM_NEIGHBOURS)
        shown.append(Neighbourhood(text.vocabulary[word], [text.vocabulary[other] for other in others], cosines))
        numbers.update(dict.fromkeys([word, *others]))
        print(f"{shown[-1].word}: {' '.join(shown[-1].others)}")
    draw(options.picture, shown, [text.vocabulary[number] for number in numbers], normalize(vectors[list(numbers)]))


if __name__ == "__main__":
    main()
