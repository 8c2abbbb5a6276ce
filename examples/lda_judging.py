"""How well the topics of `lda.py` fit documents that they were not learned from, and what they are about."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from lda_documents import Documents

FOLD_IN_STEPS = 20


@dataclass(frozen=True, slots=True)
class Completion:
    """Held-out documents, each cut into a half that is seen and a half that is to be foretold.

    The mixture of topics of a document is fitted to the seen half, by 20 steps of expectation maximisation under the
    prior alpha; then perplexity is exp(-mean log p(token)) over the tokens of the other halves.
    """

    seen: Documents
    unseen: Documents

    @classmethod
    def of(cls, documents: Documents, seed: int) -> Completion:
        """Cut each document in two by chance; one with a single token tells nothing and is left out."""
        rng = np.random.default_rng(seed)
        mixed = [rng.permutation(document) for document in documents.split()]
        mixed = [document for document in mixed if len(document) > 1]
        halves = ([document[: len(document) // 2] for document in mixed], [d[len(d) // 2 :] for d in mixed])
        return cls(Documents.of(halves[0]), Documents.of(halves[1]))

    def part(self, first: int, step: int) -> Completion:
        """Return every `step`-th document, beginning with number `first`."""
        return Completion(self.seen.part(first, step), self.unseen.part(first, step))

    def log_likelihood(self, phi: np.ndarray, alpha: float) -> tuple[float, int]:
        """Return the log likelihood of all tokens to be foretold, and their number; phi is (words, topics)."""
        mixture = self._fold_in(phi, alpha)
        owner = np.repeat(np.arange(len(self.unseen)), self.unseen.lengths())
        chances = np.einsum("tk,tk->t", mixture[owner], phi[self.unseen.words])
        return float(np.log(chances, dtype=np.float64).sum()), len(owner)

    def _fold_in(self, phi: np.ndarray, alpha: float) -> np.ndarray:
        """Return the mixture of topics of each document, (documents, topics)."""
        lengths = self.seen.lengths()
        owner, said = np.repeat(np.arange(len(self.seen)), lengths), phi[self.seen.words]
        mixture = np.full((len(self.seen), phi.shape[1]), 1 / phi.shape[1], phi.dtype)
        for _ in range(FOLD_IN_STEPS):
            shares = mixture[owner] * said
            shares /= shares.sum(1, keepdims=True)
            mixture = alpha + np.add.reduceat(shares, self.seen.ends - lengths)
            mixture /= mixture.sum(1, keepdims=True)
        return mixture


def perplexity(judged: np.ndarray) -> list[float]:
    """Return the perplexity of each row, which is (log likelihood, number of tokens)."""
    return np.exp(-judged[:, 0] / judged[:, 1]).tolist()


def top_words(phi: np.ndarray, totals: np.ndarray, num_top: int) -> np.ndarray:
    """Return the words that say most about each topic, (topics, num_top).

    Ranked by 0.6 log p(w|k) + 0.4 log p(w|k)/p(w): plain frequency puts the words first that all topics share.
    """
    everywhere = phi @ (totals / totals.sum())
    relevance = np.log(phi) - 0.4 * np.log(everywhere)[:, None]
    return np.argsort(-relevance, axis=0)[:num_top].T
