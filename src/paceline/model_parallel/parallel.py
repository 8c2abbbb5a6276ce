"""Result of `paceline.parallelize`: a model of which this worker holds a part, used as if it held all of it."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.collective.signature import CallSignature, Pattern
from paceline.model_parallel.losses import Loss
from paceline.model_parallel.mesh import Mesh
from paceline.model_parallel.part import ModelPart
from paceline.model_parallel.passing import letters_of, receive_tensors, send_tensors, text_of
from paceline.model_parallel.pipeline import Pipeline
from paceline.model_parallel.stage import parts
from paceline.model_parallel.whole import whole

_Run = Callable[[Any], Any]


class Parallel(nn.Module):
    """A model that several workers hold between them. All who hold a replica call its methods, with the same batch.

    Its parameters, buffers and their names are those of this worker's part, named as in the model it is part of.
    """

    def __init__(self, held: nn.Module, run: _Run | Pipeline, loss: Loss, part: ModelPart) -> None:
        super().__init__()
        for name, child in held.named_children():
            self.add_module(name, child)
        for name, parameter in held.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        lasting = held.state_dict().keys()
        for name, buffer in held.named_buffers(recurse=False):
            self.register_buffer(name, buffer, persistent=name in lasting)
        self._held: tuple[nn.Module, _Run | Pipeline] = (held, run)  # in a tuple, where torch sees no child
        self._loss = loss
        self._part = part
        self._followers: list[WeakMethod[Callable[[], None]]] = []

    @property
    def held(self) -> nn.Module:
        """The layers that this worker holds, in the shape that the model had."""
        return self._held[0]

    def forward(self, inputs: Any) -> Any:  # noqa: ANN401 - whatever the model takes and gives
        """Return the outputs of the whole model, on all workers of this replica. For evaluation: without gradients.

        Blocks until all of them have called it.

        Raises:
            UsageError: they were given different batches.
            PeerError: one of them is gone.
        """
        run = self._held[1]
        with self._connected("forward", inputs):
            return run.forward(inputs) if isinstance(run, Pipeline) else run(inputs)

    def forward_backward(self, inputs: Any, targets: Any) -> float:  # noqa: ANN401
        """Add the gradients of a batch to `.grad` of this worker's parameters; return the loss of the batch.

        Loss and gradients are those of the whole batch of this replica, as one process would find them. Under
        all-reduce the gradients are combined with those of the other replicas before this returns, but for calls inside
        of `optimizer.accumulate()`. Blocks until all workers of the replica have done their part.

        Args:
            inputs: (batch, ...) a tensor, or a tuple of tensors for a model that takes one.
            targets: (batch, ...) what the loss takes beside the outputs.

        Raises:
            UsageError: a batch that does not divide into micro-batches, or another one than the others were given.
            PeerError: a worker is gone, or did not come in time; the message names it.
        """
        run = self._held[1]
        if self._part.mesh is None:
            loss = self._loss(self(inputs), targets)  # through hooks, as of an optimizer that combines gradients
            loss.backward()
            return float(loss.detach())
        with self._connected("step", inputs), _split_loss(self._part):
            if isinstance(run, Pipeline):
                found = run.forward_backward(inputs, targets)
            else:
                loss = self._loss(run(inputs), targets)
                loss.backward()
                found = float(loss.detach())
        for follower in self._followers:
            act = follower()
            if act is not None:
                act()
        return found

    def when_backward(self, act: WeakMethod[Callable[[], None]]) -> None:
        """Have this called at the end of each `forward_backward` of layers that several workers hold."""
        self._followers.append(act)

    def clip_gradients(self, max_norm: float) -> float:
        """Scale all gradients of this replica so that their norm is `max_norm` at most; return the norm before.

        What `torch.nn.utils.clip_grad_norm_` does for one process. All workers of the replica must call it.
        """
        total = _squared_norm(self, self._part)
        mesh = self._part.mesh
        if mesh is not None:
            with mesh.explained("clip_gradients"):
                dist.all_reduce(total, group=mesh.group("pipeline"))
        norm = float(total.sqrt())
        for parameter in self.parameters():
            if parameter.grad is not None and norm > max_norm:
                parameter.grad.mul_(max_norm / (norm + 1e-6))
        return norm

    def train(self, mode: bool = True) -> Parallel:
        """Set the mode of the layers here."""
        self._held[0].train(mode)
        return super().train(mode)

    def whole_state_dict(self) -> dict[str, Tensor] | None:
        """Return a copy of the state of the whole model to the first worker of the replica, None to the others.

        All of them must call it; blocks until they have.
        """
        grid, position, mesh = self._part.grid, self._part.position, self._part.mesh
        if mesh is None:
            return {name: whole(tensor).clone() for name, tensor in self.state_dict().items()}
        with mesh.explained("whole_state_dict"):
            own = _whole_state(self, mesh)
            group = mesh.group("pipeline")
            if position.stage > 0:
                named = (letters_of("\n".join(own)), *own.values())
                send_tensors(named, partial(dist.send, dst=grid.rank(replace(position, stage=0)), group=group))
                return None
            for stage in range(1, grid.pipeline):
                source = grid.rank(replace(position, stage=stage))
                names, *values = receive_tensors(partial(dist.recv, src=source, group=group))
                own.update(zip(text_of(names).split("\n"), values, strict=True))
        return own if position.tensor == 0 else None

    @contextmanager
    def _connected(self, pattern: Pattern, inputs: object) -> Generator[None]:
        """See to it that the ranks of split layers are given the same batch, and say who is to blame if one is gone."""
        mesh = self._part.mesh
        if mesh is None or mesh.grid.pipeline > 1:  # a pipeline sees to it
            yield
            return
        mesh.agree(CallSignature.over(parts(inputs, "the batch")[0], pattern, root=1), pattern)
        with mesh.explained(pattern):
            yield


def _split_loss(part: ModelPart) -> AbstractContextManager[object]:
    """Return the context in which the loss takes scores that are split over tensor ranks."""
    if part.grid.tensor == 1:
        return nullcontext()
    from paceline.model_parallel.tensor import split_loss  # takes half a second

    return split_loss()


def _squared_norm(module: nn.Module, part: ModelPart) -> Tensor:
    """Return the sum of the squares of the gradients of this stage."""
    if part.mesh is not None and part.grid.tensor > 1:
        from paceline.model_parallel.tensor import squared_norm

        return squared_norm(module, part.mesh.axis("tensor"))
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    squares = (whole(one.detach().double().square().sum()).cpu() for one in gradients)
    return sum(squares, torch.zeros((), dtype=torch.float64))


def _whole_state(module: nn.Module, mesh: Mesh) -> dict[str, Tensor]:
    """Return the state of this stage, its layers whole."""
    if mesh.grid.tensor == 1:
        return {name: tensor.clone() for name, tensor in module.state_dict().items()}
    from paceline.model_parallel.tensor import whole_state

    return whole_state(module, mesh.axis("tensor"))
