"""Strategies for `paceline.distributed(strategy=...)`: how the workers of a job share one model.

Without one, servers hold the parameters, under the consistency of the job. A strategy goes by its name, too:
`strategy="diloco:50"`, or `--strategy diloco:50` for a script that names none.

Example:
    >>> import torch, paceline
    >>> _ = paceline.init()
    >>> model = torch.nn.Linear(2, 1)
    >>> adam = torch.optim.Adam(model.parameters())
    >>> optimizer = paceline.distributed(adam, model=model, strategy=paceline.strategies.diloco(50), name="fifty")
"""

from paceline.training.all_reduce import all_reduce as all_reduce
from paceline.training.downpour import downpour as downpour
from paceline.training.fsdp import fsdp as fsdp
from paceline.training.local_sgd import diloco as diloco
from paceline.training.local_sgd import local_sgd as local_sgd
from paceline.training.strategy import Strategy as Strategy

__all__ = ["Strategy", "all_reduce", "diloco", "downpour", "fsdp", "local_sgd"]
