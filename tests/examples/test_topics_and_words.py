"""LDA and word embeddings find structure that was planted, count exactly, and say what is wrong with their data."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pytest
from tests.examples.conftest import Alone
from tests.examples.planted import write_bags, write_text
from tests.launch.warm import run_job

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def _examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def numbers(text: str, line: str) -> list[float]:
    """The numbers at the end of a line; `line` is a pattern for what comes before them."""
    found = re.search(rf"{line}(.*)", text)
    assert found is not None, text
    return [float(number) for number in re.findall(r"[\d.]+", found[1])]


def test_topics_of_several_workers_are_those_that_were_planted_and_no_count_is_lost(tmp_path: Path) -> None:
    num_tokens = write_bags(tmp_path, 400)
    picture = tmp_path / "lda.png"
    options = ("--topics", "8", "--sweeps", "24", "--reference", "tokens", "--picture", picture)
    done = run_job("-n", "2", "-m", "2", EXAMPLES / "lda.py", tmp_path, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"with {num_tokens} tokens, {num_tokens} in the topics" in done.stdout
    first, *_ = numbers(done.stdout, r"2 worker\(s\), perplexity: ")
    together, alone = (
        numbers(done.stdout, f"{name}, perplexity at the end: ")[0] for name in (r"2 worker\(s\)", "token by token")
    )
    assert together < 0.6 * first
    assert together == pytest.approx(alone, rel=0.05)
    groups = [{word[0] for word in topic.split()} for topic in re.findall(r"\d%  (.*)", done.stdout)]
    assert set.union(*(group for group in groups if len(group) == 1)) == set("abcd")
    assert picture.stat().st_size > 10_000


@pytest.mark.usefixtures("_examples")
@pytest.mark.parametrize("strictly", [True, False])
def test_counts_stay_those_of_the_topics(tmp_path: Path, *, strictly: bool) -> None:
    from lda_documents import folder_corpus
    from lda_sampling import Batch, Model

    write_bags(tmp_path, 60)
    corpus, rng = folder_corpus(tmp_path), np.random.default_rng(0)
    model = Model(7, len(corpus.vocabulary))
    batch = Batch.of(corpus.train, model, rng)
    others = rng.integers(5, size=(len(batch.vocabulary), model.num_topics)).astype(np.float32)  # of other documents
    words = batch.count(model.num_topics)[0] + others
    totals, before = words.sum(0), words.copy()
    if strictly:
        batch.sample_strictly(words, totals, model, random.Random(0))
    else:
        batch.sample(words, totals, model, rng)
    assert (words != before).any()
    np.testing.assert_array_equal(words, batch.count(model.num_topics)[0] + others)
    np.testing.assert_array_equal(totals, words.sum(0))
    np.testing.assert_array_equal(words.sum(1), before.sum(1))


@pytest.mark.usefixtures("_examples")
def test_a_token_is_drawn_from_all_counts_but_its_own() -> None:
    """With one token in all every topic is as likely as any other, whatever it had before."""
    from lda_documents import Documents
    from lda_sampling import Batch, Model

    rng, model = np.random.default_rng(0), Model(4, 1)
    batch = Batch.of(Documents.of([np.array([0])]), model, rng)
    words, totals = batch.count(model.num_topics)
    seen = np.zeros(4)
    for _ in range(2000):
        batch.sample(words, totals, model, rng)
        seen += totals
    np.testing.assert_allclose(seen / 2000, 0.25, atol=0.04)


@pytest.mark.usefixtures("_examples")
def test_perplexity_is_that_of_the_words_where_all_are_alike() -> None:
    from lda_documents import Documents
    from lda_judging import Completion, perplexity

    completion = Completion.of(Documents.of([np.arange(10), np.arange(7), np.array([3])]), seed=0)
    assert perplexity(np.array([completion.log_likelihood(np.full((10, 3), 0.1), alpha=0.1)])) == [pytest.approx(10)]
    assert completion.log_likelihood(np.full((10, 3), 0.1), alpha=0.1)[1] == 5 + 4


@pytest.mark.usefixtures("_examples")
def test_the_standard_library_has_documents_for_every_example() -> None:
    from lda_documents import read_corpus

    corpus = read_corpus(None)
    assert len(corpus.train) > 500
    assert {"thread", "socket", "descriptor"} <= set(corpus.vocabulary)
    assert not {"the", "is", "self"} & set(corpus.vocabulary)


@pytest.mark.usefixtures("_examples")
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "vocab.txt").unlink(), r"has 0 files 'vocab.\*', expected one"),
        (lambda folder: (folder / "train.feat").write_text("1 2:3\n1 4:x\n"), r"train.feat, line 2: expected"),
        (lambda folder: (folder / "test.feat").write_text("1 2000:3"), r"test.feat, line 1: .* not within 0 to 48"),
    ],
    ids=["missing file", "no number", "unknown word"],
)
def test_documents_that_cannot_be_read_are_named(tmp_path: Path, spoil: object, message: str) -> None:
    from lda_documents import folder_corpus

    write_bags(tmp_path, 8)
    assert callable(spoil)
    spoil(tmp_path)
    with pytest.raises(SystemExit, match=message):
        folder_corpus(tmp_path)


def test_words_find_their_group(tmp_path: Path, alone: Alone) -> None:
    text, picture = tmp_path / "text.txt", tmp_path / "words.png"
    write_text(text, 800)
    asked = ("aa", "bb", "cc", "dd")
    done = alone("word_embeddings.py", text, "--epochs", "6", "--picture", picture, "--words", *asked)
    assert done.returncode == 0, done.stdout + done.stderr
    for word in asked:
        found = re.search(rf"^{word}: (.*)$", done.stdout, re.MULTILINE)
        assert found is not None, done.stdout
        assert {other[0] for other in found[1].split()} == {word[0]}
    assert picture.stat().st_size > 10_000


@pytest.mark.usefixtures("_examples")
def test_a_text_that_is_not_there_is_named(tmp_path: Path) -> None:
    from word_text import read_words

    with pytest.raises(SystemExit, match=r"none\.txt' cannot be read"):
        read_words(tmp_path / "none.txt")


@pytest.mark.usefixtures("_examples")
def test_close_words_are_those_within_reach() -> None:
    from word_text import WINDOW, close_pairs

    centres, contexts = close_pairs(np.arange(400), np.random.default_rng(0))
    distances = np.abs(centres - contexts)
    assert distances.min() == 1
    assert distances.max() == WINDOW
    # Each word has 2 neighbours at distance 1, and those at the largest one with chance 1 / WINDOW.
    assert (distances == 1).sum() == 2 * 399
    assert (distances == WINDOW).sum() == pytest.approx(2 * 400 / WINDOW, rel=0.2)
