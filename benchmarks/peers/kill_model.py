"""The model of the runs that are killed, for systems that compute gradients with torch."""

import torch
from kill_log import DECAY, WIDTH


class Model(torch.nn.Module):
    """The parameters; its output makes the gradient that the others have as well."""

    def __init__(self) -> None:
        super().__init__()
        self.values = torch.nn.Parameter(torch.zeros(WIDTH))

    def forward(self, offset: float) -> torch.Tensor:
        """Return the loss whose gradient is `DECAY` times the values and the offset."""
        return (0.5 * DECAY * self.values.square() + offset * self.values).sum()
