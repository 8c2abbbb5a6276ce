"""Collapsed Gibbs sampling for `lda.py`: batches of documents, drawn round by round or strictly token by token.

A token's topic k is drawn with weight (n_dk + alpha) (n_wk + beta) / (n_k + V beta), where the counts of its document
d, of its word w and of all V words leave out the token itself (Griffiths and Steyvers 2004).
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul, truediv

import numpy as np
from lda_documents import Documents

NUM_ROUNDS = 64
BATCH_DOCUMENTS = 256


@dataclass(frozen=True, slots=True)
class Model:
    """What is fixed: the number of topics, of words, and the priors of documents and of topics."""

    num_topics: int
    num_words: int
    alpha: float = 0.1
    beta: float = 0.05

    def phi(self, words: np.ndarray, totals: np.ndarray) -> np.ndarray:
        """Return how likely each topic says each word, (words, topics)."""
        return (words + self.beta) / (totals + self.num_words * self.beta)


@dataclass(slots=True)
class Batch:
    """The tokens of some documents, sorted by round.

    Attributes:
        vocabulary: (distinct,) int64, the words that these documents have.
        words: (tokens,) of each token, the place of its word in `vocabulary`.
        documents: (tokens,) of each token, the number of its document in the batch.
        rounds: where each round begins, and where the last one ends.
        topics: (tokens,) of each token. They stay with the worker.
    """

    vocabulary: np.ndarray
    words: np.ndarray
    documents: np.ndarray
    rounds: np.ndarray
    topics: np.ndarray

    @classmethod
    def of(cls, documents: Documents, model: Model, rng: np.random.Generator) -> Batch:
        """Deal the tokens of documents out over the rounds, and give each a topic by chance."""
        lengths = documents.lengths()
        owner = np.repeat(np.arange(len(documents)), lengths)
        place = np.arange(len(owner)) - np.repeat(documents.ends - lengths, lengths)
        place += np.repeat(rng.integers(NUM_ROUNDS, size=len(documents)), lengths)
        order = np.argsort(place % NUM_ROUNDS, kind="stable")
        sizes = np.bincount(place % NUM_ROUNDS, minlength=NUM_ROUNDS)
        vocabulary, words = np.unique(documents.words[order], return_inverse=True)
        topics = rng.integers(model.num_topics, size=len(owner))
        return cls(vocabulary, words, owner[order], np.cumsum([0, *sizes[sizes > 0]]), topics)

    def count(self, num_topics: int) -> tuple[np.ndarray, np.ndarray]:
        """Return how often each word, and any word, has each topic: (distinct, topics), (topics,)."""
        flat = np.bincount(self.words * num_topics + self.topics, minlength=len(self.vocabulary) * num_topics)
        words = flat.reshape(-1, num_topics).astype(np.float32)
        return words, words.sum(0)

    def sample(self, words: np.ndarray, totals: np.ndarray, model: Model, rng: np.random.Generator) -> None:
        """Draw every token once, and keep the counts (distinct, topics) and (topics,) up to date.

        The tokens of a round are drawn at once, each from counts that leave out itself and contain the others as they
        were before the round. A round has one token of a document, or one in 64 where it has more than 64 tokens.
        """
        mixed = self._mixed(model.num_topics)
        for first, last in pairwise(self.rounds):
            document, word, old = (column[first:last] for column in (self.documents, self.words, self.topics))
            tokens = np.arange(last - first)
            near, here, overall = mixed[document], words[word], np.tile(totals, (last - first, 1))
            for counts in (near, here, overall):
                counts[tokens, old] -= 1
            weights = (near + model.alpha) * (here + model.beta) / (overall + model.num_words * model.beta)
            cumulative = weights.cumsum(1)
            bar = rng.random((last - first, 1), np.float32) * cumulative[:, -1:]
            new = (cumulative[:, :-1] < bar).sum(1)
            for counts, rows in ((mixed, document), (words, word)):
                np.add.at(counts, (rows, new), 1)
                np.subtract.at(counts, (rows, old), 1)
            totals += np.bincount(new, minlength=len(totals)) - np.bincount(old, minlength=len(totals))
            self.topics[first:last] = new

    def sample_strictly(self, words: np.ndarray, totals: np.ndarray, model: Model, draw: random.Random) -> None:
        """Draw every token once as the textbook has it: one after the other, each from all counts as they are then."""
        # Lists of counts with the priors added: so the weights of a token are products of whole lists, in C.
        mixed = (self._mixed(model.num_topics).astype(np.float64) + model.alpha).tolist()
        here = (words.astype(np.float64) + model.beta).tolist()
        overall = (totals + model.num_words * model.beta).tolist()
        tokens = zip(self.documents.tolist(), self.words.tolist(), self.topics.tolist(), strict=True)
        for place, (document, word, old) in enumerate(tokens):
            of_document, of_word = mixed[document], here[word]
            of_document[old] -= 1
            of_word[old] -= 1
            overall[old] -= 1
            cumulative = list(accumulate(map(truediv, map(mul, of_document, of_word), overall)))
            new = bisect_right(cumulative, draw.random() * cumulative[-1], hi=model.num_topics - 1)
            of_document[new] += 1
            of_word[new] += 1
            overall[new] += 1
            self.topics[place] = new
        words[:] = np.rint(np.array(here) - model.beta)
        totals[:] = np.rint(np.array(overall) - model.num_words * model.beta)

    def _mixed(self, num_topics: int) -> np.ndarray:
        """Return how often each document has each topic, (documents, topics)."""
        flat = np.bincount(self.documents * num_topics + self.topics)
        flat.resize((int(self.documents.max(initial=-1)) + 1) * num_topics)
        return flat.reshape(-1, num_topics).astype(np.float32)


def make_batches(documents: Documents, num_batches: int, model: Model, rng: np.random.Generator) -> Sequence[Batch]:
    """Share documents out over so many batches."""
    return [Batch.of(documents.part(first, num_batches), model, rng) for first in range(num_batches)]
