"""The weights of a BERT from a folder, as they are published: config.json and model.safetensors."""

import json
import re
from pathlib import Path

from bert_model import Bert, Shape
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

CONFIG, WEIGHTS = "config.json", "model.safetensors"

# What the parts are called there, and here.
NAMES = (
    (r"^bert\.", ""),
    (r"^embeddings\.word_embeddings\.", "embedding.pieces."),
    (r"^embeddings\.position_embeddings\.", "embedding.places."),
    (r"^embeddings\.token_type_embeddings\.", "embedding.kinds."),
    (r"^embeddings\.LayerNorm\.", "embedding.norm."),
    (r"^encoder\.layer\.(\d+)\.attention\.self\.", r"blocks.\1."),
    (r"^encoder\.layer\.(\d+)\.attention\.output\.dense\.", r"blocks.\1.out."),
    (r"^encoder\.layer\.(\d+)\.attention\.output\.LayerNorm\.", r"blocks.\1.attention_norm."),
    (r"^encoder\.layer\.(\d+)\.intermediate\.dense\.", r"blocks.\1.widen."),
    (r"^encoder\.layer\.(\d+)\.output\.dense\.", r"blocks.\1.narrow."),
    (r"^encoder\.layer\.(\d+)\.output\.LayerNorm\.", r"blocks.\1.perceptron_norm."),
    (r"^pooler\.dense\.", "classifier.pooler."),
    (r"^classifier\.(weight|bias)$", r"classifier.scores.\1"),
    (r"\.gamma$", ".weight"),
    (r"\.beta$", ".bias"),
)
# Learned for another task, or not at all.
OPTIONAL = "classifier."


def read_shape(folder: Path, num_classes: int) -> Shape:
    """Return the shape that the folder's weights have."""
    told = json.loads(_file(folder, CONFIG).read_text(encoding="utf-8"))
    try:
        return Shape(
            num_pieces=told["vocab_size"],
            num_classes=num_classes,
            num_places=told["max_position_embeddings"],
            width=told["hidden_size"],
            num_blocks=told["num_hidden_layers"],
            num_heads=told["num_attention_heads"],
            inner=told["intermediate_size"],
            num_kinds=told["type_vocab_size"],
            padding=told.get("pad_token_id", 0),
        )
    except KeyError as missing:
        raise SystemExit(f"{folder / CONFIG} is not the configuration of a BERT: it lacks {missing}.") from missing


def load_weights(model: Bert, folder: Path) -> None:
    """Overwrite a model's values with those of the folder; what is missing of the classifier stays as it is."""
    path = _file(folder, WEIGHTS)
    try:
        found = {name_here(name): tensor for name, tensor in load_file(path).items()}
    except SafetensorError as error:
        raise SystemExit(f"{path} cannot be read: {error}.") from error
    wanted: dict[str, Tensor] = dict(model.state_dict())
    wrong = [
        f"{name}: expected {tuple(own.shape)}, got {tuple(found[name].shape) if name in found else 'nothing'}"
        for name, own in wanted.items()
        if not name.startswith(OPTIONAL) and (name not in found or found[name].shape != own.shape)
    ]
    if wrong:
        more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise SystemExit(f"{path} is not of this BERT: {'; '.join(wrong[:3])}{more}.")
    fitting = {name: found[name] for name, own in wanted.items() if name in found and found[name].shape == own.shape}
    model.load_state_dict(fitting, strict=False)


def name_here(name: str) -> str:
    """Return what a published weight is called here.

    >>> name_here("bert.encoder.layer.3.attention.output.LayerNorm.gamma")
    'blocks.3.attention_norm.weight'
    """
    for there, here in NAMES:
        name = re.sub(there, here, name)
    return name


def _file(folder: Path, name: str) -> Path:
    path = folder / name
    if not path.is_file():
        raise SystemExit(
            f"There is no {path}: give --weights a folder with {CONFIG} and {WEIGHTS}, or leave it out to start from "
            "scratch."
        )
    return path
