"""The four directions as autograd functions: dispatch and combine, each forward and backward.

Dispatch forward and combine backward are ``scatter_rows``; combine forward and dispatch backward are
``gather_sum``. Everything else about them (formats, weighting, which inputs get gradients) is here. Each
direction is a method of :class:`Channel`, so that the operators of :mod:`ep_comm.operators` do the same.

Collectives in a backward pass hang unless every rank runs it. Two inputs see to that. The dispatch takes an
``anchor`` that always requires a gradient, so its backward is recorded on a rank whose tokens do not (one
without tokens, say). The combine takes the dispatched ``weights`` even where it does not multiply by them,
which ties it to its dispatch on a rank whose expert output is not connected to the graph.

Under activation recomputation the collectives of the recomputed forward pass and those of the backward pass
must not change places from rank to rank either. Recomputation starts when the first saved tensor is asked
for and ends with the last, so both functions always save one and ask for it before they communicate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .mxfp8 import MXFP8Tensor
from .rows import weighted_backward
from .transport.base import Route, RowFormat, Transport

__all__ = ["Channel", "Combine", "Dispatch"]


@dataclass(frozen=True)
class Channel:
    """What both directions of a dispatch share.

    Attributes:
        transport, route: how to move rows.
        label: names the dispatcher and the dispatch in error messages.
        sequence: number of the dispatch among those of its dispatcher.
        dispatch_format: wire format of the dispatch forward.
        mxfp8_gradients: whether the combine backward travels as MXFP8.
        rounding: scale rule of MXFP8.
    """

    transport: Transport
    route: Route
    label: str
    sequence: int
    dispatch_format: RowFormat
    mxfp8_gradients: bool
    rounding: str

    def operation(self, direction: str) -> str:
        """The text that errors use for an operation of this dispatch."""
        return f"{direction} of {self.label}"

    def dispatch_forward(self, tokens_TH: Tensor, weights_TK: Tensor) -> tuple[Tensor | MXFP8Tensor, Tensor]:
        """Rows ``[R, H]`` and their weights ``[R]``."""
        return self.transport.scatter_rows(
            self.route,
            tokens_TH.contiguous(),
            weights_TK.contiguous(),
            self.dispatch_format,
            self.operation("dispatch forward"),
        )

    def dispatch_backward(self, grad_RH: Tensor, grad_weights_R: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the tokens ``[T, H]`` and of the routing weights ``[T, K]``."""
        return self.transport.gather_sum(
            self.route,
            grad_RH.to(self.dispatch_format.dtype).contiguous(),
            None,
            grad_weights_R.contiguous(),
            self.operation("dispatch backward"),
        )

    def combine_forward(self, output_RH: Tensor, weights_R: Tensor | None) -> Tensor:
        """Sums ``[T, H]`` of the rows, times ``weights_R`` if given."""
        out_TH, _ = self.transport.gather_sum(
            self.route, output_RH.contiguous(), weights_R, None, self.operation("combine forward")
        )
        return out_TH

    def combine_backward(self, grad_TH: Tensor, dtype: torch.dtype) -> Tensor:
        """Every row's gradient ``[R, H]`` in ``dtype``, that of the combined rows; not yet times its weight."""
        wire = RowFormat(dtype, mxfp8=self.mxfp8_gradients, rounding=self.rounding)
        grad_RH, _ = self.transport.scatter_rows(
            self.route, grad_TH.contiguous(), None, wire, self.operation("combine backward")
        )
        return grad_RH

    def weighted_backward(self, output_RH: Tensor, grad_RH: Tensor, weights_R: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of rows and weights ``[R]``, given that of their product."""
        return weighted_backward(output_RH, grad_RH, weights_R, self.route.plan.expert_offsets_L1[-1:])


class Dispatch(torch.autograd.Function):
    """``(tokens [T,H], weights [T,K]) -> (rows [R,H], scales [R,S] or None, weights [R])``.

    Rows received as MXFP8 carry no gradient of their own; their place in the graph is then taken by the
    second to last output, a ``[R, H]`` tensor without storage.
    """

    @staticmethod
    def forward(
        ctx: Any, tokens_TH: Tensor, weights_TK: Tensor, anchor: Tensor, channel: Channel
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.channel = channel
        ctx.save_for_backward(weights_TK)
        rows, weights_R = channel.dispatch_forward(tokens_TH, weights_TK)
        shape = (channel.route.sizing.rows, tokens_TH.shape[1])
        ctx.rows_like = (shape, tokens_TH.dtype, tokens_TH.device)
        if not isinstance(rows, MXFP8Tensor):
            return rows, None, None, weights_R
        ctx.mark_non_differentiable(rows.data, rows.scales)
        link_RH = torch.zeros((), dtype=tokens_TH.dtype, device=tokens_TH.device).expand(shape)
        return rows.data, rows.scales, link_RH, weights_R

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_rows: Tensor | None, _scales: None, grad_link: Tensor | None, grad_weights: Tensor | None
    ) -> tuple[Tensor, Tensor, None, None]:
        _ = ctx.saved_tensors
        channel: Channel = ctx.channel
        shape, dtype, device = ctx.rows_like
        grad_RH = grad_rows if grad_rows is not None else grad_link
        if grad_RH is None:
            grad_RH = torch.zeros(shape, dtype=dtype, device=device)
        if grad_weights is None:
            grad_weights = torch.zeros(shape[0], dtype=torch.float32, device=device)
        return *channel.dispatch_backward(grad_RH, grad_weights), None, None


class Combine(torch.autograd.Function):
    """``(expert_output [R,H], weights [R]) -> [T,H]``, multiplying by the weights where asked."""

    @staticmethod
    def forward(ctx: Any, output_RH: Tensor, weights_R: Tensor, channel: Channel, apply_weights: bool) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.channel = channel
        ctx.apply_weights = apply_weights
        output_RH = output_RH.contiguous()
        ctx.output_like = (output_RH.shape[1], output_RH.dtype, output_RH.device)
        ctx.save_for_backward(weights_R, *([output_RH] if apply_weights else []))
        return channel.combine_forward(output_RH, weights_R if apply_weights else None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TH: Tensor | None) -> tuple[Tensor, Tensor | None, None, None]:
        weights_R, *saved = ctx.saved_tensors
        channel: Channel = ctx.channel
        hidden_size, dtype, device = ctx.output_like
        if grad_TH is None:
            grad_TH = torch.zeros(channel.route.plan.num_tokens, hidden_size, dtype=dtype, device=device)
        grad_RH = channel.combine_backward(grad_TH, dtype)
        if not ctx.apply_weights:
            return grad_RH, None, None, None
        return *channel.weighted_backward(saved[0], grad_RH, weights_R), None, None
