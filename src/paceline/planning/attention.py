"""Attention as fused kernels compute it: without a matrix of scores that the backward pass would need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode


class FusedAttention(TorchFunctionMode):
    """Within it, `scaled_dot_product_attention` keeps queries, keys, values and its result, and nothing else.

    On the meta device torch takes the path of separate operations, which keeps more than the kernels of real devices.
    """

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """Take the place of the one function, and call every other."""
        if func is scaled_dot_product_attention and len(args) >= 3:
            return _Attention.apply(*args[:3])
        return func(*args, **(kwargs or {}))


class _Attention(Function):
    """Two products, so that their operations are counted; only ever run forward."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:  # noqa: ANN401 - torch's own
        """Keep what the fused kernels keep."""
        found = torch.softmax(queries @ keys.transpose(-2, -1), dim=-1) @ values
        ctx.save_for_backward(queries, keys, values, found)
        return found
