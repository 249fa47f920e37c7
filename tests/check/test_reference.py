"""The check's own reference: small cases by hand, and the tests' reference, which shares nothing with it."""

from __future__ import annotations

import pytest
import torch

from ep_comm import dequantize_mxfp8, quantize_mxfp8
from ep_comm.check.reference import Inputs, expected, layout, make_inputs, mxfp8_image
from tests import reference


def by_hand(topk_idx: list[list[list[int]]], outputs: list[list[list[float]]]) -> Inputs:
    """Four experts, H = 1, all weights 0.5, all gradients 1."""
    idx = torch.tensor(topk_idx)
    ranks, tokens, slots = idx.shape
    return Inputs(
        num_experts=4,
        num_tokens=[tokens] * ranks,
        tokens=torch.arange(1.0, ranks * tokens + 1).reshape(ranks, tokens, 1).bfloat16(),
        topk_idx=idx,
        topk_weights=torch.full((ranks, tokens, slots), 0.5),
        outputs=torch.tensor(outputs).unsqueeze(-1).bfloat16(),
        grad_out=torch.ones(ranks, tokens, 1, dtype=torch.bfloat16),
        grad_rows=torch.ones(ranks, tokens, slots, 1, dtype=torch.bfloat16),
        grad_row_weights=torch.ones(ranks, tokens, slots),
    )


TWO_RANKS = by_hand([[[0, 3], [3, 3]], [[2, -1], [-1, -1]]], [[[256, 1], [256, 1]], [[1, 1], [1, 1]]])


def test_rows_on_paper() -> None:
    where = layout(TWO_RANKS, 1, alignment=2)
    assert where.tokens_per_expert.tolist() == [1, 3]
    assert where.expert_offsets.tolist() == [0, 2, 6]
    padding = [-1, -1, -1]
    assert where.source.tolist() == [[1, 0, 0], padding, [0, 0, 1], [0, 1, 0], [0, 1, 1], padding]
    assert where.fill(TWO_RANKS.outputs, 8, 0.0).flatten().tolist() == [1, 0, 1, 256, 1, 0, 0, 0]


def test_sums_on_paper() -> None:
    plain = expected(TWO_RANKS, 0, alignment=1, mxfp8=False, apply_weights=False)
    # bf16 has no 257: the owner rounds it for token 0, the experts' rank for token 1.
    assert plain.out.flatten().tolist() == [256, 256]
    assert plain.grad_tokens.flatten().tolist() == [2, 2]
    weighted = expected(TWO_RANKS, 0, alignment=1, mxfp8=False, apply_weights=True)
    assert weighted.out.flatten().tolist() == [128, 128]
    assert weighted.grad_outputs.flatten().tolist() == [0.5]
    assert weighted.grad_dots.tolist() == [[256, 1], [256, 1]]
    absent = expected(TWO_RANKS, 1, alignment=1, mxfp8=False, apply_weights=True)
    assert absent.out.flatten().tolist() == [0.5, 0] and absent.grad_weights.tolist() == [[1, 0], [0, 0]]


def test_a_host_rounds_once() -> None:
    inputs = by_hand([[[0, 3, 3]], [[-1, -1, -1]]], [[[1, 256, 1]], [[0, 0, 0]]])
    options = {"alignment": 1, "mxfp8": False, "apply_weights": False}
    assert expected(inputs, 0, **options).out == 256  # 1 + round(256 + 1) = 257, rounded
    assert expected(inputs, 0, **options, hosts=[[0, 1]]).out == 258
    assert expected(inputs, 0, **options, hosts=[[0], [1]]).out == 256


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mxfp8", [False, True])
def test_agrees_with_the_reference_of_the_tests(seed: int, mxfp8: bool) -> None:
    inputs = make_inputs(3, 6, 3, 32, 8, torch.bfloat16, seed)
    idx = [of_rank[:count].tolist() for of_rank, count in zip(inputs.topk_idx, inputs.num_tokens, strict=True)]
    plan = reference.layouts(idx, 6, 4)
    tokens, weights, grads = (
        [of_rank[:count] for of_rank, count in zip(values, inputs.num_tokens, strict=True)]
        for values in (inputs.tokens, inputs.topk_weights, inputs.grad_out)
    )
    outputs = [layout(inputs, rank, 4).fill(inputs.outputs, plan[rank].required_rows, torch.nan) for rank in range(3)]
    wire = "rceil" if mxfp8 else None
    rows, row_weights = reference.dispatch(plan, tokens, weights, wire)
    out = reference.combine(plan, outputs, weights, True)
    grad_outputs = reference.combine_grad_outputs(plan, grads, weights, True, wire)
    for rank in range(3):
        want = expected(inputs, rank, alignment=4, mxfp8=mxfp8, apply_weights=True)
        assert want.layout.expert_offsets.tolist() == plan[rank].expert_offsets
        assert torch.equal(want.rows, rows[rank])
        assert torch.equal(want.weights, row_weights[rank])
        assert torch.equal(want.out, out[rank])
        assert torch.equal(want.grad_outputs, grad_outputs[rank])


def test_mxfp8_image() -> None:
    make = torch.Generator().manual_seed(0)
    rows = torch.randn(64, 64, generator=make) * torch.logspace(-30, 30, 64).unsqueeze(1)
    rows[0] = 0.0
    rows[1:3, :32] = 2.0**-9  # the smallest element at scale 1, lost at scale 2
    rows[1, 0], rows[2, 0] = 448.0, 450.0  # the largest at scale 1, and above it
    rows = rows.bfloat16()
    assert mxfp8_image(rows)[1:3, 1].tolist() == [2.0**-9, 0.0]
    assert torch.equal(mxfp8_image(rows), dequantize_mxfp8(quantize_mxfp8(rows)))
