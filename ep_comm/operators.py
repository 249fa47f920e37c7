"""dispatch and combine as operators of ``torch.library``: for torch.compile and selective activation checkpointing.

An operator takes and returns tensors and numbers only. So it names its dispatcher by number, and what a combine and
the backward passes must know of a dispatch is named by a *ticket*, a tensor with one number, on the CPU:

    dispatch(tokens, topk_idx, topk_weights, ...) ──▶ rows, weights, counts, offsets, ticket
                                                                                        │
    combine(rows, weights, ticket, ...) ──▶ sums          the channel of the dispatch ◀─┘
    dispatch_backward(..., ticket)                        lives as long as the ticket's memory
    combine_backward(..., ticket)

The ticket's memory belongs to a Python object that holds the channel. Whoever keeps the tensor, or a view of it, for
later (the handle, autograd for the backward pass, activation checkpointing instead of computing it again) keeps the
channel, and nobody else does: there is nothing to release by hand.

Shapes are arguments: the rows of a static buffer, the tokens of a combine. The trace reads the budget where the
dispatcher keeps it, and torch.compile guards what it reads, so a budget that has grown leads to a new trace. The
operator moves as many rows as it is told, whatever the budget is by then.

Imported by the first trace only, since operators need what torch.compile imports, which takes seconds.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from .arguments import check_dispatch
from .directions import Channel
from .dispatcher import Dispatcher, dispatcher_of_number
from .errors import EPError, HandleError
from .handle import Dispatched, DispatchHandle

__all__ = ["combine", "dispatch", "unless_recomputed"]

_BY_WHAT_ARRIVES = -1


def dispatch(dispatcher: Dispatcher, tokens: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Dispatched:
    """:meth:`ep_comm.Dispatcher.dispatch` by operators. Its handle carries a ticket."""
    config = dispatcher.config
    if torch.compiler.is_compiling():
        if config.mode == "eager" or config.recv_format == "mxfp8":
            return _dispatch_outside(dispatcher, tokens, topk_idx, topk_weights)
        planned = dispatcher.budget_rows
    else:
        planned = dispatcher.planned_rows
    rows, weights, tokens_per_expert, expert_offsets, ticket = torch.ops.ep_comm.dispatch(
        tokens,
        topk_idx,
        topk_weights,
        dispatcher.anchor,
        dispatcher.number,
        _BY_WHAT_ARRIVES if planned is None else planned,
        dispatcher.num_local_experts,
    )
    handle = DispatchHandle(
        num_tokens=tokens.shape[0],
        num_rows=rows.shape[0],
        weights=weights,
        rows_link=None,
        dispatcher=dispatcher,
        channel=None,
        ticket=ticket,
    )
    return Dispatched(rows, weights, tokens_per_expert, expert_offsets, handle)


def combine(dispatcher: Dispatcher, expert_output: Tensor, handle: DispatchHandle, apply_weights: bool) -> Tensor:
    """:meth:`ep_comm.Dispatcher.combine` by operators, for a handle with a ticket."""
    if handle.ticket is None:
        return _combine_outside(dispatcher, expert_output, handle, apply_weights)
    return torch.ops.ep_comm.combine(
        expert_output, handle.weights, handle.ticket, dispatcher.number, handle.num_tokens, apply_weights
    )


def unless_recomputed(new: Tensor, old: Tensor) -> Tensor:
    """A copy of ``new``; of ``old`` where the code runs in a backward pass, to recompute activations.

    A trace cannot ask which it is, as the same compiled code serves both.
    """
    return torch.ops.ep_comm.unless_recomputed(new, old)


def _outside(method: Any, why: str) -> Any:
    """The method as code that torch.compile leaves alone: it breaks the graph, or says why with fullgraph=True."""

    def call(*args: Any) -> Any:
        return method(*args)

    return torch.compiler.disable(call, reason=f"ep_comm: {why}")


_dispatch_outside = _outside(
    Dispatcher.dispatch,
    "a dispatch in eager mode reads on the host how many rows arrive, and MXFP8 rows (recv_format='mxfp8') have no "
    "operator; mode='static' with recv_format='bf16' compiles without a graph break",
)
_combine_outside = _outside(
    Dispatcher.combine, "the handle is of a dispatch that was not compiled; compile both or neither"
)


# -- tickets -----------------------------------------------------------------------------------------------


class _Ticket(bytearray):
    """Eight bytes with the ticket's number, the memory of a tensor, and what the number stands for."""

    dispatcher: Dispatcher
    channel: Channel


_tickets: WeakValueDictionary[int, _Ticket] = WeakValueDictionary()
_numbers: Iterator[int] = itertools.count(1)


def _issue(dispatcher: Dispatcher, channel: Channel) -> Tensor:
    number = next(_numbers)
    ticket = _Ticket(number.to_bytes(8, sys.byteorder))
    ticket.dispatcher, ticket.channel = dispatcher, channel
    _tickets[number] = ticket
    return torch.frombuffer(ticket, dtype=torch.int64)


def _issued(ticket: Tensor) -> _Ticket:
    # On the CPU, so that this waits for no device.
    issued = _tickets.get(int(ticket))
    if issued is None:
        raise HandleError("the handle of a compiled dispatch is a copy that outlived the original: keep the original")
    return issued


# -- operators ---------------------------------------------------------------------------------------------


def _operator(schema: str) -> Any:
    """Makes an operator ``ep_comm::<function's name>`` without side effects that autograd or a tracer must know."""

    def make(implementation: Any) -> Any:
        name = f"ep_comm::{implementation.__name__.strip('_')}"
        return torch.library.custom_op(name, implementation, mutates_args=(), schema=schema)

    return make


@_operator(
    "(Tensor tokens, Tensor topk_idx, Tensor topk_weights, Tensor anchor, SymInt number, SymInt rows, "
    "SymInt num_local_experts) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
def _dispatch(
    tokens: Tensor, topk_idx: Tensor, topk_weights: Tensor, anchor: Tensor, number: int, rows: int, num_local: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rows ``[R, H]``, weights ``[R]``, tokens per expert ``[L]``, expert offsets ``[L + 1]``, ticket ``[1]``.

    ``anchor`` requires a gradient, so that the backward pass is recorded on every rank.
    """
    dispatcher = dispatcher_of_number(number)
    if rows != _BY_WHAT_ARRIVES and dispatcher.planned_rows is None:
        raise EPError(
            f"rank {dispatcher.rank}: compiled code of {dispatcher.name} was called where buffers are sized by what "
            f"arrives (the replay of a step); the code was compiled by other means than torch.compile"
        )
    fault = check_dispatch(dispatcher, tokens, topk_idx, topk_weights)
    if fault is not None:
        tokens, topk_idx, topk_weights = dispatcher.no_tokens()
    planned = None if rows == _BY_WHAT_ARRIVES else rows
    channel = dispatcher.open_channel(tokens, topk_idx, topk_weights, fault, rows=planned)
    received_RH, weights_R = channel.dispatch_forward(tokens, topk_weights)
    dispatcher.finish_dispatch(topk_idx, fault)
    plan = channel.route.plan
    # The plan's own tensors stay with the channel: what an operator returns belongs to its caller.
    counts_L, offsets_L1 = plan.tokens_per_expert_L.clone(), plan.expert_offsets_L1.clone()
    return received_RH, weights_R, counts_L, offsets_L1, _issue(dispatcher, channel)


@_dispatch.register_fake
def _(
    tokens: Tensor, topk_idx: Tensor, topk_weights: Tensor, anchor: Tensor, number: int, rows: int, num_local: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_rows = rows if rows >= 0 else torch.library.get_ctx().new_dynamic_size()
    return (
        tokens.new_empty(num_rows, tokens.shape[1]),
        topk_weights.new_empty(num_rows),
        tokens.new_empty(num_local, dtype=torch.int64),
        tokens.new_empty(num_local + 1, dtype=torch.int64),
        torch.empty(1, dtype=torch.int64, device="cpu"),
    )


@_operator(
    "(Tensor grad_rows, Tensor grad_weights, Tensor ticket, SymInt num_tokens, SymInt top_k) -> (Tensor, Tensor)"
)
def _dispatch_backward(
    grad_rows: Tensor, grad_weights: Tensor, ticket: Tensor, num_tokens: int, top_k: int
) -> tuple[Tensor, Tensor]:
    """Gradients of tokens ``[T, H]`` and routing weights ``[T, K]``."""
    return _issued(ticket).channel.dispatch_backward(grad_rows, grad_weights)


@_dispatch_backward.register_fake
def _(grad_rows: Tensor, grad_weights: Tensor, ticket: Tensor, num_tokens: int, top_k: int) -> tuple[Tensor, Tensor]:
    return grad_rows.new_empty(num_tokens, grad_rows.shape[1]), grad_weights.new_empty(num_tokens, top_k)


def _save_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(output[4])
    ctx.num_tokens, ctx.top_k = inputs[1].shape


def _differentiate_dispatch(ctx: Any, grad_rows: Tensor, grad_weights: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    (ticket,) = ctx.saved_tensors
    grad_TH, grad_TK = torch.ops.ep_comm.dispatch_backward(grad_rows, grad_weights, ticket, ctx.num_tokens, ctx.top_k)
    return grad_TH, None, grad_TK, None, None, None, None


_dispatch.register_autograd(_differentiate_dispatch, setup_context=_save_dispatch)


@_operator(
    "(Tensor expert_output, Tensor weights, Tensor ticket, SymInt number, SymInt num_tokens, bool apply_weights) "
    "-> Tensor"
)
def _combine(
    expert_output: Tensor, weights: Tensor, ticket: Tensor, number: int, num_tokens: int, apply_weights: bool
) -> Tensor:
    """Sums ``[T, H]``. ``weights`` tie the combine to its dispatch, also where it does not multiply by them."""
    issued = _issued(ticket)
    handle = DispatchHandle.of(issued.dispatcher, issued.channel, weights)
    dispatcher_of_number(number).admit_combine(expert_output, handle, apply_weights)
    return issued.channel.combine_forward(expert_output, weights if apply_weights else None)


@_combine.register_fake
def _(
    expert_output: Tensor, weights: Tensor, ticket: Tensor, number: int, num_tokens: int, apply_weights: bool
) -> Tensor:
    return expert_output.new_empty(num_tokens, expert_output.shape[1])


@_operator("(Tensor grad, Tensor ticket, SymInt num_rows) -> Tensor")
def _combine_backward(grad: Tensor, ticket: Tensor, num_rows: int) -> Tensor:
    """The rows' gradient ``[R, H]``."""
    return _issued(ticket).channel.combine_backward(grad, grad.dtype)


@_combine_backward.register_fake
def _(grad: Tensor, ticket: Tensor, num_rows: int) -> Tensor:
    return grad.new_empty(num_rows, grad.shape[1])


@_operator("(Tensor grad, Tensor expert_output, Tensor weights, Tensor ticket) -> (Tensor, Tensor)")
def _weighted_combine_backward(
    grad: Tensor, expert_output: Tensor, weights: Tensor, ticket: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the rows ``[R, H]`` and of their weights ``[R]``."""
    channel = _issued(ticket).channel
    grad_RH = channel.combine_backward(grad, expert_output.dtype)
    return channel.weighted_backward(expert_output.contiguous(), grad_RH, weights)


@_weighted_combine_backward.register_fake
def _(grad: Tensor, expert_output: Tensor, weights: Tensor, ticket: Tensor) -> tuple[Tensor, Tensor]:
    return expert_output.new_empty(expert_output.shape), weights.new_empty(weights.shape)


def _save_combine(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    expert_output, weights, ticket, _, _, apply_weights = inputs
    ctx.apply_weights, ctx.num_rows = apply_weights, expert_output.shape[0]
    ctx.save_for_backward(ticket, *([expert_output, weights] if apply_weights else []))


def _differentiate_combine(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    ticket, *saved = ctx.saved_tensors
    if ctx.apply_weights:
        grad_RH, grad_R = torch.ops.ep_comm.weighted_combine_backward(grad, *saved, ticket)
    else:
        grad_RH, grad_R = torch.ops.ep_comm.combine_backward(grad, ticket, ctx.num_rows), None
    return grad_RH, grad_R, None, None, None, None


_combine.register_autograd(_differentiate_combine, setup_context=_save_combine)


@_operator("(Tensor new, Tensor old) -> Tensor")
def _unless_recomputed(new: Tensor, old: Tensor) -> Tensor:
    return (new if torch._C._current_graph_task_id() == -1 else old).clone()


@_unless_recomputed.register_fake
def _(new: Tensor, old: Tensor) -> Tensor:
    return torch.empty_like(new)
