"""What the examples of model parallelism are made of: their models, texts, plans, and what they refuse."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from paceline.job.strategy import Distribution

EXAMPLES = Path(__file__).parents[2] / "examples"

sys.path.insert(0, str(EXAMPLES))
import bert  # noqa: E402
import bert_model  # noqa: E402
import bert_weights  # noqa: E402
import big_mlp_plan  # noqa: E402
import glue  # noqa: E402
import gpt_model  # noqa: E402
from gpt_text import Text, Windows, read_text  # noqa: E402
from wordpiece import WordPiece, words_of  # noqa: E402

sys.path.remove(str(EXAMPLES))

GPT = gpt_model.Shape(num_characters=11, length=12, width=16, num_blocks=2, num_heads=4)
BERT = bert_model.Shape(
    num_pieces=20, num_classes=3, num_places=10, width=16, num_blocks=2, num_heads=4, inner=32, padding=0
)
MARKS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]


def vocabulary(folder: Path, *pieces: str) -> Path:
    path = folder / "vocab.txt"
    path.write_text("\n".join([*MARKS, *pieces]) + "\n")
    return path


# -- models --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [gpt_model.GPT(GPT), bert_model.Bert(BERT)], ids=["gpt", "bert"])
def test_the_layers_are_the_model(model: gpt_model.GPT | bert_model.Bert) -> None:
    pieces = torch.randint(11, (3, 8))
    assert torch.equal(nn.Sequential(*model.layers())(pieces), model(pieces))
    held = {parameter for layer in model.layers() for parameter in layer.parameters()}
    assert held == set(model.parameters())


def test_no_character_sees_what_comes_later() -> None:
    model = gpt_model.GPT(GPT)
    one = torch.randint(11, (1, 12))
    other = one.clone()
    other[0, 7:] = (other[0, 7:] + 1) % 11
    torch.testing.assert_close(model(one)[0, :7], model(other)[0, :7])
    assert not torch.allclose(model(one)[0, 7:], model(other)[0, 7:])


def test_padding_changes_nothing() -> None:
    model = bert_model.Bert(BERT)
    sentence = torch.randint(1, 20, (2, 5))
    padded = torch.cat([sentence, torch.zeros(2, 4, dtype=torch.int64)], dim=1)
    torch.testing.assert_close(model(padded), model(sentence))


# -- BERT: pieces, sentences, weights ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Hello, World!", ["hello", ",", "world", "!"]),
        ("it's\ta\n test", ["it", "'", "s", "a", "test"]),
        ("naïve Café", ["naive", "cafe"]),
        ("a\u00adb\x00c", ["abc"]),
        ("5€ $7 ~x^2`", ["5€", "$", "7", "~", "x", "^", "2", "`"]),
        ("她说 hi", ["她", "说", "hi"]),
        ("", []),
    ],
)
def test_text_is_cut_into_words(text: str, words: list[str]) -> None:
    assert words_of(text) == words


def test_words_are_cut_into_the_longest_pieces(tmp_path: Path) -> None:
    wordpiece = WordPiece.read(vocabulary(tmp_path, "un", "##aff", "##able", "##a", "run", "##ning", "runn", "##in"))
    assert wordpiece.size == 12
    assert wordpiece.pieces("unaffable running") == ["un", "##aff", "##able", "[UNK]"]  # runn leaves ##ing
    assert wordpiece.pieces("una " + "a" * 101) == ["un", "##a", "[UNK]"]
    assert wordpiece.encode("unaffable run un", 6) == [2, 4, 5, 6, 8, 3]
    assert wordpiece.encode("run", 6) == [2, 8, 3, 0, 0, 0]


def test_a_vocabulary_that_is_missing_or_none_is_told(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"no vocabulary .*nowhere: give --vocabulary"):
        WordPiece.read(tmp_path / "nowhere")
    (tmp_path / "words.txt").write_text("just\nwords\n")
    with pytest.raises(SystemExit, match=r"lacks \[PAD\], \[UNK\], \[CLS\], \[SEP\]"):
        WordPiece.read(tmp_path / "words.txt")


def test_files_that_are_not_given_are_asked_for() -> None:
    with pytest.raises(SystemExit, match="Give --dev, --vocabulary: TSV files in the format of GLUE"):
        bert.read(Namespace(made_up=False, train=Path("train.tsv"), dev=None, vocabulary=None))


def test_sentences_are_read_as_glue_writes_them(tmp_path: Path) -> None:
    path = tmp_path / "train.tsv"
    path.write_text('sentence\tlabel\na "fine" one\t1\nnot that\t0\n')
    assert glue.read_examples(path) == [glue.Example('a "fine" one', 1), glue.Example("not that", 0)]
    path.write_text("label\tcontent\n0\tflat\n")
    assert glue.read_examples(path) == [glue.Example("flat", 0)]


@pytest.mark.parametrize(
    ("content", "told"),
    [("", "has the columns"), ("id\tsentence\n", "expected label"), ("label\tsentence\nyes\tfine\n", "line 2")],
)
def test_files_of_another_kind_are_refused(content: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "dev.tsv").write_text(content)
    with pytest.raises(SystemExit, match=told):
        glue.read_examples(tmp_path / "dev.tsv")
    with pytest.raises(SystemExit, match="There is no file"):
        glue.read_examples(tmp_path / "train.tsv")


def test_made_up_sentences_are_the_same_for_all_and_known_to_their_vocabulary(tmp_path: Path) -> None:
    training, judging, words = glue.make_up(tmp_path)
    wordpiece, examples = WordPiece.read(words), glue.read_examples(training)
    assert [len(examples), len(glue.read_examples(judging))] == list(glue.NUM_MADE_UP)
    assert {example.label for example in examples} == {0, 1}
    assert not any("[UNK]" in wordpiece.pieces(example.sentence) for example in examples)
    assert glue.read_examples(glue.make_up(tmp_path)[0]) == examples


PUBLISHED = {
    "embedding.pieces.weight": "bert.embeddings.word_embeddings.weight",
    "embedding.places.weight": "bert.embeddings.position_embeddings.weight",
    "embedding.kinds.weight": "bert.embeddings.token_type_embeddings.weight",
    "embedding.norm.weight": "bert.embeddings.LayerNorm.gamma",
    "embedding.norm.bias": "bert.embeddings.LayerNorm.beta",
    "blocks.{}.query": "bert.encoder.layer.{}.attention.self.query",
    "blocks.{}.key": "bert.encoder.layer.{}.attention.self.key",
    "blocks.{}.value": "bert.encoder.layer.{}.attention.self.value",
    "blocks.{}.out": "bert.encoder.layer.{}.attention.output.dense",
    "blocks.{}.attention_norm": "bert.encoder.layer.{}.attention.output.LayerNorm",
    "blocks.{}.widen": "bert.encoder.layer.{}.intermediate.dense",
    "blocks.{}.narrow": "bert.encoder.layer.{}.output.dense",
    "blocks.{}.perceptron_norm": "bert.encoder.layer.{}.output.LayerNorm",
    "classifier.pooler": "bert.pooler.dense",
}


def publish(model: nn.Module, folder: Path, left_out: str = "nothing") -> None:
    """Write the weights of a model as a published BERT has them, without a classifier."""
    state = model.state_dict()
    named = {}
    for here, there in PUBLISHED.items():
        for block in range(BERT.num_blocks) if "{}" in here else [0]:
            for end in [""] if here in state else [".weight", ".bias"]:
                named[there.format(block) + end] = state[here.format(block) + end].clone()
    named["cls.predictions.bias"] = torch.zeros(BERT.num_pieces)
    save_file({name: value for name, value in named.items() if left_out not in name}, folder / "model.safetensors")
    (folder / "config.json").write_text(
        '{"vocab_size": 20, "max_position_embeddings": 10, "hidden_size": 16, "num_hidden_layers": 2, '
        '"num_attention_heads": 4, "intermediate_size": 32, "type_vocab_size": 2}'
    )


def test_published_weights_come_to_their_places(tmp_path: Path) -> None:
    theirs = bert_model.Bert(BERT)
    publish(theirs, tmp_path)
    assert bert_weights.read_shape(tmp_path, num_classes=3) == BERT
    ours = bert_model.Bert(BERT)
    scores = ours.classifier.scores.weight.clone()
    bert_weights.load_weights(ours, tmp_path)
    state = ours.state_dict()
    different = [name for name, value in theirs.state_dict().items() if not torch.equal(value, state[name])]
    assert different == ["classifier.scores.weight"]
    assert torch.equal(ours.classifier.scores.weight, scores)


def test_weights_that_are_missing_or_of_another_model_are_told(tmp_path: Path) -> None:
    model = bert_model.Bert(BERT)
    with pytest.raises(SystemExit, match=r"no .*config\.json: give --weights a folder"):
        bert_weights.read_shape(tmp_path, num_classes=2)
    publish(model, tmp_path, left_out="layer.1.intermediate")
    with pytest.raises(SystemExit, match=r"blocks\.1\.widen\.weight: expected \(32, 16\), got nothing"):
        bert_weights.load_weights(model, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no weights at all")
    with pytest.raises(SystemExit, match="cannot be read"):
        bert_weights.load_weights(model, tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit, match="lacks 'vocab_size'"):
        bert_weights.read_shape(tmp_path, num_classes=2)


# -- GPT and the big perceptron ------------------------------------------------------------------------------------


def test_windows_are_followed_by_what_comes_next() -> None:
    text = Text.of("abcdefghij" * 20)
    assert (text.characters, len(text.training), len(text.held_out)) == ("abcdefghij", 190, 10)
    windows = Windows(text.training, length=6, num_windows=5, seed=3)
    for inputs, targets in (windows[index] for index in range(len(windows))):
        assert torch.equal((inputs + 1) % 10, targets)
    with pytest.raises(SystemExit, match="give a longer one"):
        Windows(text.held_out, length=10, num_windows=1, seed=0)
    with pytest.raises(SystemExit, match="There is no text nowhere"):
        read_text(Path("nowhere"))


def test_the_plan_says_what_fits_and_what_to_take_instead() -> None:
    task = big_mlp_plan.Task(width=512, num_blocks=4, batch=16)
    alone = big_mlp_plan.need_bytes(task, Distribution.parse("all-reduce"), 2)
    halved = big_mlp_plan.need_bytes(task, Distribution.parse("pipeline:2"), 2)
    assert 16 * 8 * 512**2 < alone < 18 * 8 * 512**2  # weight, gradient and two moments, and a little
    assert halved == pytest.approx(alone / 2, rel=0.1)
    assert big_mlp_plan.refuse_unless_it_fits(task, Distribution.parse("pipeline:2"), 2, alone) == halved
    with pytest.raises(SystemExit, match=r"under all-reduce.*Take --strategy pipeline:2 \(\d+ MB\) or tensor:2"):
        big_mlp_plan.refuse_unless_it_fits(task, Distribution.parse("local-sgd:5"), 2, 0.6 * alone)
    with pytest.raises(SystemExit, match="Take more workers"):
        big_mlp_plan.refuse_unless_it_fits(task, Distribution(), 1, 1e6)
