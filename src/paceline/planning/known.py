"""Models that everybody knows, by their published size and shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from paceline.planning.transformer import Transformer


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model by name: how it is written, the published number of its parameters, and its shape."""

    title: str
    num_parameters: float
    shape: Transformer


KNOWN_MODELS: Final[Mapping[str, KnownModel]] = {
    "bert-large": KnownModel("BERT-Large", 0.32e9, Transformer(24, 1024, 16, 30522, 512)),
    "gpt-2": KnownModel("GPT-2", 1.5e9, Transformer(48, 1600, 25, 50257, 1024)),
    "turing-nlg": KnownModel("Turing-NLG", 17.2e9, Transformer(78, 4256, 28, 50257, 1024)),
    "gpt-3": KnownModel("GPT-3", 175e9, Transformer(96, 12288, 96, 50257, 2048)),
}
COMPARED_DEVICES: Final = ("v100-16", "v100-32", "a100-40", "a100-80")
