"""Rows handed out as MXFP8: the bytes are those of the codec, and gradients flow through ``rows_link``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ep_comm
from ep_comm import Dispatcher, EPConfig, MXFP8Tensor

from .harness import run_ranks


class ScaledRows(torch.autograd.Function):
    """Stands for a block-scaled GEMM: takes bytes, and the link as the place for the rows' gradient."""

    @staticmethod
    def forward(ctx: Any, data: Tensor, scales: Tensor, link: Tensor) -> Tensor:
        return 3.0 * MXFP8Tensor(data, scales).dequantize(torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:
        return None, None, 3.0 * grad


def through_the_link(rank: int, world_size: int, mode: str) -> None:
    config = EPConfig(
        num_experts=4,
        top_k=2,
        hidden_size=64,
        max_tokens_per_rank=16,
        mode=mode,
        capacity_factor=None if mode == "eager" else 4.0,
        dispatch_forward_dtype="mxfp8",
        recv_format="mxfp8",
    )
    make = torch.Generator().manual_seed(rank)
    x = torch.randn(6, 64, generator=make).requires_grad_()
    weights = torch.rand(6, 2, generator=make)
    with Dispatcher(config) as dispatcher:
        d = dispatcher.dispatch(x, torch.randint(0, 4, (6, 2), generator=make), weights)
        assert isinstance(d.tokens, MXFP8Tensor) and d.handle.rows_link.shape == d.tokens.shape
        assert d.handle.rows_link.untyped_storage().nbytes() == 4
        out = dispatcher.combine(ScaledRows.apply(*d.tokens, d.handle.rows_link), d.handle, apply_weights=True)
        decoded = ep_comm.dequantize_mxfp8(ep_comm.quantize_mxfp8(x.detach()), torch.float32)
        total = weights.sum(1, keepdim=True)
        torch.testing.assert_close(out, 3.0 * decoded * total)
        out.sum().backward()
        torch.testing.assert_close(x.grad, (3.0 * total).expand(6, 64))


@pytest.mark.parametrize("mode", ["eager", "static"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_flow_through_the_link(mode: str, world_size: int) -> None:
    run_ranks(through_the_link, world_size, mode)
