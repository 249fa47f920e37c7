"""The experts of one rank as two grouped matrix products, and the expert that every token passes.

    rows_RH    │ e0 e0 0 0 │ e1 0 0 0 │   │ e3 e3 e3 0 │ tail, never read │      expert_offsets = 0 4 8 8 12
                     │          │               │
    grouped GEMM     ▼ W[0]     ▼ W[1]          ▼ W[3]

Segments may be empty, and rows after the last segment (static mode) may hold anything: neither the
forward pass nor a weight's gradient reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from ..errors import ArgumentError, ConfigError
from .init import resolve_seed, seeded_generator, uniform_fan_in_
from .precision import autocast_dtype

__all__ = ["GroupedExperts", "SharedExpert", "check_row_bytes", "ignore_experts_in_ddp"]

# torch.nn.functional.grouped_mm wants rows of whole 16-byte units, on every device.
ROW_BYTES = 16


class GroupedExperts(nn.Module):
    """SwiGLU experts of one rank: ``y = (silu(x W_gate) * (x W_up)) W_down`` (Shazeer 2020, arXiv
    2002.05202).

    The weights of expert ``first_expert + l`` are drawn from a generator seeded by ``seed`` and that global
    number: they are the same wherever the expert lives (see :mod:`ep_comm.moe.init`). Random numbers of CPU
    and GPU differ, so build on one kind of device what should start equal.

    Args:
        num_local_experts: L.
        hidden_size, ffn_size: H and I. A row of either must be a multiple of 16 bytes: of 8 elements in
            16-bit dtypes, of 4 in float32.
        first_expert: global number of the first local expert, ``rank * L``.
        seed: of the initial weights; ``None`` draws one from torch's default generator. Give every rank
            the same.
        dtype, device: of the weights. On GPUs use bfloat16: for other dtypes torch falls back to one
            matrix product per expert and reads the offsets on the host, which cannot be captured in a graph.

    Attributes:
        gate_up_proj: ``[L, H, 2 I]`` parameter, ``W_gate`` beside ``W_up``.
        down_proj: ``[L, I, H]`` parameter. Both carry ``ep_expert = True``: these parameters differ between
            the ranks of the expert-parallel group, so their gradients must not be averaged over it.

    Raises:
        ConfigError: a size is out of range or not a multiple of 16 bytes.
    """

    def __init__(
        self,
        num_local_experts: int,
        hidden_size: int,
        ffn_size: int,
        *,
        first_expert: int = 0,
        seed: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        _check_sizes(num_local_experts=num_local_experts, hidden_size=hidden_size, ffn_size=ffn_size)
        self.num_local_experts = num_local_experts
        self.hidden_size = hidden_size
        self.ffn_size = ffn_size
        self.first_expert = first_expert
        self.seed = resolve_seed(seed)
        self.gate_up_proj = nn.Parameter(
            torch.empty(num_local_experts, hidden_size, 2 * ffn_size, dtype=dtype, device=device)
        )
        self.down_proj = nn.Parameter(torch.empty(num_local_experts, ffn_size, hidden_size, dtype=dtype, device=device))
        check_row_bytes(self.gate_up_proj.dtype, hidden_size=hidden_size, ffn_size=ffn_size)
        self._mark()
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill the weights from ``seed`` and the experts' global numbers. Does nothing on ``meta``."""
        if self.gate_up_proj.is_meta:
            return
        for local in range(self.num_local_experts):
            generator = seeded_generator(self.seed, f"expert {self.first_expert + local}", self.gate_up_proj.device)
            uniform_fan_in_(self.gate_up_proj[local], self.hidden_size, generator)
            uniform_fan_in_(self.down_proj[local], self.ffn_size, generator)

    def forward(self, rows_RH: torch.Tensor, expert_offsets_L1: torch.Tensor) -> torch.Tensor:
        """Run each segment of rows through its expert.

        Args:
            rows_RH: ``[R, H]`` in the weights' dtype, under autocast in any; ``R = 0`` is fine.
            expert_offsets_L1: ``[L + 1]`` integer on the rows' device. Expert ``l`` gets the rows from
                ``expert_offsets_L1[l]`` up to ``expert_offsets_L1[l + 1]``. The first must be 0.

        Returns:
            ``[R, H]``. Rows after the last segment are undefined, and so are those rows of the gradient of
            ``rows_RH``; a gradient that arrives for them is ignored.

        Raises:
            ArgumentError: a shape, dtype or device is wrong.
            ConfigError: autocast asks for a dtype in which a row is not a multiple of 16 bytes.
        """
        dtype = autocast_dtype(rows_RH.device)
        if dtype is None:
            dtype = self.gate_up_proj.dtype
        else:
            rows_RH = rows_RH.to(dtype)
        self._check(rows_RH, expert_offsets_L1, dtype)
        if rows_RH.shape[0] == 0:
            return _NoRows.apply(rows_RH, self.gate_up_proj, self.down_proj)
        ends_L = expert_offsets_L1[1:].to(torch.int32)
        both_RI = F.grouped_mm(rows_RH.contiguous(), self.gate_up_proj.to(dtype), offs=ends_L)
        gate_RI, up_RI = both_RI.chunk(2, dim=-1)
        y_RH = F.grouped_mm(F.silu(gate_RI) * up_RI, self.down_proj.to(dtype), offs=ends_L)
        return _ContiguousGradient.apply(y_RH)

    def _check(self, rows_RH: torch.Tensor, expert_offsets_L1: torch.Tensor, dtype: torch.dtype) -> None:
        if rows_RH.dim() != 2 or rows_RH.shape[1] != self.hidden_size or rows_RH.dtype != dtype:
            raise ArgumentError(
                f"rows must be {dtype} of shape [R, hidden_size={self.hidden_size}], "
                f"got {rows_RH.dtype} of shape {list(rows_RH.shape)}"
            )
        if list(expert_offsets_L1.shape) != [self.num_local_experts + 1]:
            raise ArgumentError(
                f"expert_offsets must have shape [num_local_experts + 1 = {self.num_local_experts + 1}], "
                f"got {list(expert_offsets_L1.shape)}"
            )
        if not rows_RH.device == expert_offsets_L1.device == self.gate_up_proj.device:
            raise ArgumentError(
                f"rows, expert_offsets and the weights must be on one device, got {rows_RH.device}, "
                f"{expert_offsets_L1.device} and {self.gate_up_proj.device}"
            )
        check_row_bytes(dtype, hidden_size=self.hidden_size, ffn_size=self.ffn_size)

    def _mark(self) -> None:
        for parameter in self.parameters():
            parameter.ep_expert = True

    # A conversion from meta and a deep copy make new parameters, without the attributes of the old.

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> GroupedExperts:
        super()._apply(fn, recurse)
        self._mark()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._mark()

    def extra_repr(self) -> str:
        last = self.first_expert + self.num_local_experts - 1
        sizes = f"hidden_size={self.hidden_size}, ffn_size={self.ffn_size}"
        return f"experts {self.first_expert} to {last}, {sizes}"


class _NoRows(torch.autograd.Function):
    """What the experts do to zero rows, which grouped_mm refuses: nothing, with gradients of zero.

    The weights get zeros and not None, so that an optimizer or a gradient reduction finds the same
    parameters on a rank that received no rows as on the others.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, rows_0H: torch.Tensor, *weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(*weights)
        return torch.empty_like(rows_0H)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad_0H: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return grad_0H, *(torch.zeros_like(weight) for weight in ctx.saved_tensors)


class _ContiguousGradient(torch.autograd.Function):
    """Identity whose gradient is laid out densely: grouped_mm refuses an expanded one, as of ``y.sum()``."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, y_RH: torch.Tensor) -> torch.Tensor:
        return y_RH.view_as(y_RH)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad_RH: torch.Tensor) -> torch.Tensor:
        return grad_RH.contiguous()


class SharedExpert(nn.Module):
    """A SwiGLU expert that every token passes, on the token's own rank, with weight 1.

    Replicated on every rank: its gradients are averaged like those of any dense layer.

    Args:
        hidden_size, ffn_size: H and I.
        seed: of the initial weights; ``None`` draws one from torch's default generator. Give every rank
            the same.
        dtype, device: of the weights.

    Attributes:
        gate_up_proj: ``[2 I, H]`` parameter.
        down_proj: ``[H, I]`` parameter.

    Raises:
        ConfigError: a size is out of range.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        *,
        seed: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        _check_sizes(hidden_size=hidden_size, ffn_size=ffn_size)
        self.hidden_size = hidden_size
        self.ffn_size = ffn_size
        self.seed = resolve_seed(seed)
        self.gate_up_proj = nn.Parameter(torch.empty(2 * ffn_size, hidden_size, dtype=dtype, device=device))
        self.down_proj = nn.Parameter(torch.empty(hidden_size, ffn_size, dtype=dtype, device=device))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill the weights from ``seed``. Does nothing on ``meta``."""
        if self.gate_up_proj.is_meta:
            return
        generator = seeded_generator(self.seed, "shared", self.gate_up_proj.device)
        uniform_fan_in_(self.gate_up_proj, self.hidden_size, generator)
        uniform_fan_in_(self.down_proj, self.ffn_size, generator)

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        """``[..., H]`` to ``[..., H]``, in the weights' dtype (or autocast's)."""
        gate_TI, up_TI = F.linear(x_TH, self.gate_up_proj).chunk(2, dim=-1)
        return F.linear(F.silu(gate_TI) * up_TI, self.down_proj)

    def extra_repr(self) -> str:
        return f"hidden_size={self.hidden_size}, ffn_size={self.ffn_size}"


def check_row_bytes(dtype: torch.dtype, **sizes: int) -> None:
    """Raise ConfigError for the first of ``sizes`` that is not a multiple of 16 bytes in ``dtype``."""
    multiple = max(ROW_BYTES // dtype.itemsize, 1)
    for name, value in sizes.items():
        if value % multiple:
            raise ConfigError(
                f"{name} must be a multiple of {multiple} for experts in {dtype} "
                f"(grouped_mm wants rows of whole {ROW_BYTES}-byte units), got {value}"
            )


def _check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} must be an integer above 0, got {value!r}")


def ignore_experts_in_ddp(model: nn.Module) -> None:
    """Keep ``DistributedDataParallel`` away from the experts of ``model``; call it before wrapping the model.

    DDP would copy rank 0's experts over those of the other ranks and average gradients of different experts.
    The experts' parameters (``ep_expert = True``) are excluded; everything else is reduced as usual.
    """
    names = [name for name, parameter in model.named_parameters() if getattr(parameter, "ep_expert", False)]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
