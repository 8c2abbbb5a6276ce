"""A BERT that classifies sentences, from files in the format of GLUE; distributed in any way by a flag alone.

    python examples/bert.py --made-up
    paceline run examples/bert.py --train SST-2/train.tsv --dev SST-2/dev.tsv --vocabulary vocab.txt
    paceline run --strategy all-reduce examples/bert.py --made-up
    paceline run --strategy pipeline:2 examples/bert.py --made-up
    paceline run --strategy tensor:2 examples/bert.py --made-up

--train and --dev are TSV files with the columns label and sentence, --vocabulary has one piece of WordPiece a line.
--weights names a folder with config.json and model.safetensors of a published BERT, whose vocab.txt is then the one to
give; without it a small one starts from scratch. Under every strategy the replicas together take --batch sentences a
step. There is no dropout, so that all strategies compute the same.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from batches import batch_of_replica
from bert_model import Bert, Shape
from bert_weights import load_weights, read_shape
from glue import Example, make_up, read_examples
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from wordpiece import PADDING, WordPiece

import paceline

RATE, FINE_RATE = 1e-3, 3e-5  # from scratch, and from weights that know the language


def main(options: Namespace) -> None:
    """Train for some epochs, then say how many sentences of the other file are classified right."""
    ps = paceline.init()
    words, training, judging = read(options)
    num_classes = 1 + max(example.label for example in (*training, *judging))
    torch.manual_seed(options.seed)
    model = paceline.parallelize(make_model(options, words, num_classes), loss=cross_entropy)
    rate = options.rate or (FINE_RATE if options.weights else RATE)
    optimizer = paceline.distributed(torch.optim.AdamW(model.parameters(), lr=rate), model=model)

    batch = batch_of_replica(ps, options.batch)
    loader = DataLoader(encoded(words, training, options.length), batch, shuffle=True, drop_last=True)
    batches = paceline.shard(loader, seed=options.seed)
    ps.barrier()  # time counts from here
    for _ in range(options.epochs):
        for pieces, labels in batches:
            optimizer.zero_grad()
            loss = model.forward_backward(pieces, labels)
            optimizer.step()
            paceline.report(loss=loss)

    ps.barrier()
    with optimizer.snapshot():
        loss, accuracy = judge(model, encoded(words, judging, options.length), batch)
    if ps.rank == 0:
        paceline.report(loss=loss, accuracy=accuracy)
        print(f"{ps.size} worker(s): {len(judging)} sentences, loss {loss:.3f}, accuracy {accuracy:.3f}")


def read(options: Namespace) -> tuple[WordPiece, list[Example], list[Example]]:
    """Read the vocabulary and both files, or make them up."""
    if options.made_up:
        with TemporaryDirectory() as folder:
            training, judging, vocabulary = make_up(Path(folder))
            return WordPiece.read(vocabulary), read_examples(training)[: options.limit], read_examples(judging)
    missing = [name for name in ("train", "dev", "vocabulary") if getattr(options, name) is None]
    if missing:
        raise SystemExit(
            f"Give --{', --'.join(missing)}: TSV files in the format of GLUE, and a vocabulary of WordPiece with one "
            "piece a line; or --made-up."
        )
    words = WordPiece.read(options.vocabulary)
    return words, read_examples(options.train)[: options.limit], read_examples(options.dev)


def make_model(options: Namespace, words: WordPiece, num_classes: int) -> Bert:
    """Return the model of the given weights, or a small one from scratch."""
    if options.weights is None:
        width = options.width
        return Bert(
            Shape(
                num_pieces=words.size,
                num_classes=num_classes,
                num_places=options.length,
                width=width,
                num_blocks=options.blocks,
                num_heads=options.heads,
                inner=4 * width,
                padding=words.numbers[PADDING],
            )
        )
    shape = read_shape(options.weights, num_classes)
    if shape.num_pieces < words.size or shape.num_places < options.length:
        raise SystemExit(
            f"The weights in {options.weights} know {shape.num_pieces} pieces and {shape.num_places} places: expected "
            f"{words.size} pieces, as in the vocabulary, and at least {options.length} places (--length)."
        )
    model = Bert(shape)
    load_weights(model, options.weights)
    return model


def encoded(words: WordPiece, examples: Sequence[Example], length: int) -> TensorDataset:
    """Return the pieces, (examples, length) int64, and the labels, (examples,) int64."""
    pieces = torch.tensor([words.encode(example.sentence, length) for example in examples])
    return TensorDataset(pieces, torch.tensor([example.label for example in examples]))


def judge(model: nn.Module, data: TensorDataset, batch: int) -> tuple[float, float]:
    """Return the mean loss, and the share that is classified right; each batch has the size of those in training."""
    scores: list[Tensor] = []
    for pieces, _ in DataLoader(data, batch):
        lacking = batch - len(pieces)
        scores.append(model(torch.cat([pieces, pieces[:1].expand(lacking, -1)]))[: len(pieces)])
    labels = data.tensors[1]
    found = torch.cat(scores)
    return float(cross_entropy(found, labels)), float((found.argmax(1) == labels).float().mean())


def parse() -> Namespace:
    parser = ArgumentParser(description="A BERT that classifies sentences.")
    parser.add_argument("--train", type=Path, help="a TSV file to learn from")
    parser.add_argument("--dev", type=Path, help="a TSV file to be judged by")
    parser.add_argument("--vocabulary", type=Path, help="pieces of WordPiece, one a line")
    parser.add_argument("--weights", type=Path, help="a folder with config.json and model.safetensors")
    parser.add_argument("--made-up", action="store_true", help="take made-up sentences")
    parser.add_argument("--limit", type=int, help="learn from so many sentences only")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=32, help="sentences of a step, of all replicas together")
    parser.add_argument("--length", type=int, default=32, help="pieces that are read of a sentence")
    parser.add_argument("--rate", type=float, help="learning rate of AdamW")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main(parse())
