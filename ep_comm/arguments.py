"""Checks of the tensors that users pass in. They find faults; raising is done by all ranks together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .handle import DispatchHandle
from .status import ANY_FLOAT, DTYPES, Fault, FaultCode, device_values, dtype_value, shape_values

if TYPE_CHECKING:
    from .dispatcher import Dispatcher

__all__ = ["check_combine", "check_dispatch", "check_layer_input"]


def check_dispatch(dispatcher: Dispatcher, tokens: Any, topk_idx: Any, topk_weights: Any) -> Fault | None:
    """The first thing that is wrong with the arguments of a dispatch, as far as the host can see."""
    config = dispatcher.config
    if dispatcher.closed:
        return Fault(FaultCode.CLOSED)
    if not _is_dense(tokens):
        return Fault(FaultCode.TOKENS_TYPE, detail=_kind(tokens))
    if tokens.dim() != 2 or tokens.shape[1] != config.hidden_size:
        return Fault(FaultCode.TOKENS_SHAPE, _shape(tokens))
    if tokens.dtype not in DTYPES:
        return Fault(FaultCode.TOKENS_DTYPE, (dtype_value(tokens.dtype),))
    if not _device_fits(dispatcher, tokens):
        return Fault(FaultCode.TOKENS_DEVICE, _devices(tokens, dispatcher.device))
    if tokens.shape[0] > config.max_tokens_per_rank:
        return Fault(FaultCode.TOO_MANY_TOKENS, (tokens.shape[0],))
    expected = (tokens.shape[0], config.top_k)
    return _check_slots(topk_idx, expected, tokens.device, (torch.int32, torch.int64), FaultCode.IDX_TYPE) or (
        _check_slots(topk_weights, expected, tokens.device, (torch.float32,), FaultCode.WEIGHTS_TYPE)
    )


def check_combine(dispatcher: Dispatcher, expert_output: Any, handle: Any) -> Fault | None:
    """The first thing that is wrong with the arguments of a combine."""
    if dispatcher.closed:
        return Fault(FaultCode.CLOSED)
    if not isinstance(handle, DispatchHandle):
        return Fault(FaultCode.HANDLE_TYPE, detail=f"got {type(handle).__name__}")
    if handle.dispatcher is not dispatcher:
        detail = f"it was made by {handle.dispatcher.name}, this is {dispatcher.name}"
        return Fault(FaultCode.HANDLE_FOREIGN, detail=detail)
    if not _is_dense(expert_output):
        return Fault(FaultCode.OUTPUT_TYPE, detail=_kind(expert_output))
    if expert_output.shape != (handle.num_rows, dispatcher.config.hidden_size):
        values = [*_shape(expert_output), 0, 0, 0][:3]
        return Fault(FaultCode.OUTPUT_SHAPE, (*values, handle.num_rows))
    if expert_output.dtype not in DTYPES:
        return Fault(FaultCode.OUTPUT_DTYPE, (dtype_value(expert_output.dtype),))
    if expert_output.device != dispatcher.device:
        return Fault(FaultCode.OUTPUT_DEVICE, _devices(expert_output, dispatcher.device))
    return None


def check_layer_input(
    dispatcher: Dispatcher, x: Any, token_mask: Any, *, dtype: torch.dtype, autocast: bool
) -> Fault | None:
    """The first thing that is wrong with the arguments of an MoE layer.

    Args:
        dtype: of the experts.
        autocast: every floating dtype of ``x`` will do.
    """
    if not _is_dense(x):
        return Fault(FaultCode.X_TYPE, detail=_kind(x))
    if x.dim() == 0 or x.shape[-1] != dispatcher.config.hidden_size:
        return Fault(FaultCode.X_SHAPE, shape_values(tuple(x.shape)))
    if not x.is_floating_point() if autocast else x.dtype != dtype:
        return Fault(FaultCode.X_DTYPE, (dtype_value(x.dtype), ANY_FLOAT if autocast else dtype_value(dtype)))
    if not _device_fits(dispatcher, x):
        return Fault(FaultCode.X_DEVICE, _devices(x, dispatcher.device))
    if token_mask is None:
        return None
    if not _is_dense(token_mask):
        return Fault(FaultCode.MASK_TYPE, detail=_kind(token_mask))
    if token_mask.shape != x.shape[:-1]:
        got, allowed = list(token_mask.shape), list(x.shape[:-1])
        values = (-1, len(allowed), len(got))
        if len(got) == len(allowed):
            where = next(i for i, size in enumerate(allowed) if got[i] != size)
            values = (where, allowed[where], got[where])
        return Fault(FaultCode.MASK_SHAPE, values, f"must be {allowed}, got {got}")
    if token_mask.dtype != torch.bool:
        return Fault(FaultCode.MASK_DTYPE, (dtype_value(token_mask.dtype),))
    if token_mask.device != x.device:
        return Fault(FaultCode.MASK_DEVICE, _devices(token_mask, x.device))
    return None


def _check_slots(
    value: Any,
    shape: tuple[int, int],
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
    first_code: FaultCode,
) -> Fault | None:
    """Type, shape, dtype and device of a ``[T, K]`` argument; its codes follow ``first_code`` in this order."""
    if not _is_dense(value):
        return Fault(first_code, detail=_kind(value))
    if tuple(value.shape) != shape:
        return Fault(FaultCode(first_code + 1), _shape(value))
    if value.dtype not in dtypes:
        return Fault(FaultCode(first_code + 2), (dtype_value(value.dtype),))
    if value.device != device:
        return Fault(FaultCode(first_code + 3), _devices(value, device))
    return None


def _device_fits(dispatcher: Dispatcher, tokens: Tensor) -> bool:
    if dispatcher.ep_size == 1:
        return tokens.device.type in ("cpu", "cuda")
    return tokens.device == dispatcher.device


def _is_dense(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided


def _kind(value: Any) -> str:
    return f"got a tensor of layout {value.layout}" if isinstance(value, Tensor) else f"got {type(value).__name__}"


def _devices(tensor: Tensor, expected: torch.device) -> tuple[int, ...]:
    """The tensor's device and the expected one, as the status words carry them."""
    return (*device_values(tensor.device), *device_values(expected))


def _shape(tensor: Tensor) -> tuple[int, ...]:
    """Number of dimensions and the first sizes, as the status words carry them."""
    return (tensor.dim(), *tensor.shape)[:4]
