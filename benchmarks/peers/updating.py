"""The update on a peer's server: sum the gradients of all workers, then one fused momentum step with their mean."""

import torch
import work
from torch import Tensor


class Updater:
    """Values, momentum, and the sum of the step under way. Used by one thread at a time."""

    def __init__(self, num_workers: int, num_parameters: int) -> None:
        self._parameter = torch.nn.Parameter(torch.from_numpy(work.first_values(num_parameters)))
        self._optimizer = torch.optim.SGD([self._parameter], lr=work.LR, momentum=work.MOMENTUM, fused=True)
        self._sum = torch.empty(num_parameters)
        self._num_workers = num_workers
        self._num_added = 0

    @property
    def values(self) -> Tensor:
        """The values, live."""
        return self._parameter.detach()

    def add(self, gradient: Tensor) -> bool:
        """Add a worker's gradient; the last of a step updates the values and returns True."""
        if self._num_added:
            self._sum.add_(gradient)
        else:
            self._sum.copy_(gradient)
        self._num_added += 1
        if self._num_added < self._num_workers:
            return False
        self._num_added = 0
        self._parameter.grad = self._sum.div_(self._num_workers)
        self._optimizer.step()
        return True
