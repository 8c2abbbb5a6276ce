"""Topics of documents (LDA) by Gibbs sampling, with the counts on the parameter server; then by one process alone.

    python examples/lda.py
    paceline run --workers 4 --servers 2 examples/lda.py -- FOLDER

FOLDER holds bags of words (train.*, test.*, vocab.*); without one, the standard library's own text is taken. Documents
and the topics of their tokens stay with their worker. Shared are counts alone: how often each word has each topic, one
row a word, and how often all words together have it. What is not exact, and how much:

1. The tokens of a batch are drawn in 64 rounds, those of a round at once; see `Batch.sample`. The process alone does
   the same; with `--reference tokens` it draws one token after the other, as the textbook has it.
2. A worker draws from counts that contain all its own changes, and those of others up to two clocks (batches) ago.

No change is ever lost, so the counts stay whole numbers that add up: at the end this is asserted for every word.
"""

import argparse
import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from lda_counts import SharedCounts, assert_exact
from lda_documents import Corpus, read_corpus
from lda_judging import Completion, perplexity, top_words
from lda_picture import Topic, draw
from lda_sampling import BATCH_DOCUMENTS, Model, make_batches
from pictures import check_matplotlib

import paceline

MAX_HELD_OUT, NUM_TOP_WORDS = 1500, 9
ALONE = {"rounds": "one process alone", "tokens": "one process alone, token by token"}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Learn the topics of documents as several workers.")
    parser.add_argument("folder", nargs="?", type=Path, help="with train.*, test.* and vocab.*")
    parser.add_argument("--topics", type=int, default=20)
    parser.add_argument("--sweeps", type=int, default=60, help="how often every token is drawn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reference", choices=(*ALONE, "none"), default="rounds", help="what is done alone")
    parser.add_argument("--picture", type=Path, default=Path("lda.png"))
    return parser.parse_args()


def sample_together(
    ps: paceline.Session, corpus: Corpus, completion: Completion, model: Model, options: argparse.Namespace
) -> tuple[np.ndarray, np.ndarray, Sequence[float]]:
    """Return the final counts of each word and of all words, and the perplexity after each sweep."""
    counts = SharedCounts(ps, model.num_topics)
    judged = ps.table(
        "judged", rows=2, update=paceline.update.Add(), consistency=paceline.ssp(2), scale="sum", dtype="float64"
    )
    rng = np.random.default_rng([options.seed, ps.rank])
    num_batches = math.ceil(len(corpus.train) / ps.size / BATCH_DOCUMENTS)  # the same for all: each ends a clock
    batches = make_batches(corpus.train.part(ps.rank, ps.size), num_batches, model, rng)
    own_completion, every_word = completion.part(ps.rank, ps.size), np.arange(model.num_words)

    for batch in batches:
        counts.push(batch.vocabulary, *batch.count(model.num_topics))
    ps.clock()
    ps.barrier()  # no worker draws from incomplete counts
    for sweep in range(options.sweeps):
        for batch in batches:
            words, totals = counts.pull(batch.vocabulary)
            drawn_words, drawn_totals = words.copy(), totals.copy()
            batch.sample(drawn_words, drawn_totals, model, rng)
            counts.push(batch.vocabulary, drawn_words - words, drawn_totals - totals)
            ps.clock()
        phi = model.phi(*counts.pull(every_word, exact=True))
        judged.push([sweep], [own_completion.log_likelihood(phi, model.alpha)])
    ps.clock()
    ps.barrier()  # now all pushes of all workers are applied

    if ps.rank == 0:
        went = counts.words.traffic
        print(
            f"worker 0 pushed {went.pushed.total_bytes / 1e6:.1f} MB of word counts and pulled "
            f"{went.pulled.total_bytes / 1e6:.1f} MB; key caching saved {went.total.saved_on_keys:.0%} of the ids"
        )
    perplexities = perplexity(judged.pull(np.arange(options.sweeps), exact=True).numpy())
    return *counts.pull(every_word, exact=True), perplexities


def sample_alone(corpus: Corpus, completion: Completion, model: Model, options: argparse.Namespace) -> Iterator[float]:
    """Yield the perplexity after each sweep of a process with plain arrays."""
    rng, draw_one = np.random.default_rng([options.seed, 99]), random.Random(options.seed)
    batches = make_batches(corpus.train, math.ceil(len(corpus.train) / BATCH_DOCUMENTS), model, rng)
    words = np.zeros((model.num_words, model.num_topics), np.float32)
    for batch in batches:
        words[batch.vocabulary] += batch.count(model.num_topics)[0]
    totals = words.sum(0, dtype=np.float64)
    for _ in range(options.sweeps):
        for batch in batches:
            of_batch = words[batch.vocabulary]
            if options.reference == "tokens":
                batch.sample_strictly(of_batch, totals, model, draw_one)
            else:
                batch.sample(of_batch, totals, model, rng)
            words[batch.vocabulary] = of_batch
        yield perplexity(np.array([completion.log_likelihood(model.phi(words, totals), model.alpha)]))[0]


def report(
    corpus: Corpus,
    model: Model,
    words: np.ndarray,
    totals: np.ndarray,
    curves: Mapping[str, Sequence[float]],
    picture: Path,
) -> None:
    """Print and draw how perplexity fell, and what the topics are about."""
    for name, curve in curves.items():
        print(f"{name}, perplexity: {' '.join(f'{value:.0f}' for value in curve[:: -(len(curve) // -12)])}")
        print(f"{name}, perplexity at the end: {curve[-1]:.2f}")
    best = top_words(model.phi(words, totals), totals, NUM_TOP_WORDS)
    shares = (totals / totals.sum()).tolist()
    topics = [Topic(share, [corpus.vocabulary[word] for word in row]) for share, row in zip(shares, best, strict=True)]
    topics.sort(reverse=True)
    for topic in topics:
        print(f"{topic.share:5.1%}  {' '.join(topic.words)}")
    draw(picture, curves, topics)


def main() -> None:
    options = parse_arguments()
    check_matplotlib()
    corpus = read_corpus(options.folder)
    model = Model(options.topics, len(corpus.vocabulary))
    completion = Completion.of(corpus.test.part(0, math.ceil(len(corpus.test) / MAX_HELD_OUT)), seed=0)
    began = time.monotonic()
    with paceline.connect() as ps:
        words, totals, perplexities = sample_together(ps, corpus, completion, model, options)
    if ps.rank != 0:
        return
    assert_exact(words, totals, corpus)
    curves = {f"{ps.size} worker(s)": perplexities}
    print(f"{ps.size} worker(s) took {time.monotonic() - began:.0f} s")
    if options.reference != "none":
        began = time.monotonic()
        curves[ALONE[options.reference]] = list(sample_alone(corpus, completion, model, options))
        print(f"{ALONE[options.reference]} took {time.monotonic() - began:.0f} s")
    report(corpus, model, words, totals, curves, options.picture)


if __name__ == "__main__":
    main()
