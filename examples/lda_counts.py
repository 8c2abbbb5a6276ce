"""How often each topic has each word, in a table on the servers."""

import numpy as np
from lda_documents import Corpus

import paceline


class SharedCounts:
    """The counts on the servers: a row of topics for each word, and one row for all words together."""

    def __init__(self, ps: paceline.Session, num_topics: int) -> None:
        add, policy = paceline.update.Add(), paceline.ssp(2)
        # A worker keeps rows, and asks for them again only when they are too old. Batches come again in every sweep,
        # so the list of their words is sent once. float32 holds whole numbers up to 16 million, float64 far more.
        self.words = ps.table(
            "words",
            rows=num_topics,
            update=add,
            consistency=policy,
            scale="sum",
            cache=True,
            filters=[paceline.filters.KeyCache()],
        )
        self.totals = ps.table(
            "totals", rows=num_topics, update=add, consistency=policy, scale="sum", cache=True, dtype="float64"
        )

    def pull(self, vocabulary: np.ndarray, *, exact: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Return the counts of these words, (words, topics), and of all words, (topics,)."""
        return self.words.pull(vocabulary, exact=exact).numpy(), self.totals.pull([0], exact=exact).numpy()[0]

    def push(self, vocabulary: np.ndarray, words: np.ndarray, totals: np.ndarray) -> None:
        """Add to the counts."""
        self.words.push(vocabulary, words)
        self.totals.push([0], totals[None])


def assert_exact(words: np.ndarray, totals: np.ndarray, corpus: Corpus) -> None:
    """Raise AssertionError unless topics add up to how often each word is there, and words to each topic."""
    frequencies = np.bincount(corpus.train.words, minlength=len(words))
    assert (words >= 0).all()
    assert (words == np.round(words)).all()
    assert (words.sum(1, dtype=np.float64) == frequencies).all()
    assert (words.sum(0, dtype=np.float64) == totals).all()
    print(f"counts exact: {len(words)} words with {frequencies.sum()} tokens, {totals.sum():.0f} in the topics")
