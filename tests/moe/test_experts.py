"""Experts: against a loop in float64, with poisoned tails, no rows, idle experts; initial weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ep_comm.errors import ArgumentError, ConfigError
from ep_comm.moe.experts import GroupedExperts, SharedExpert

# Segment ends: an idle expert at the front, in the middle and at the end, one large and one small segment.
OFFSETS = [0, 0, 48, 48, 64, 64]
USED = 64


def make(dtype: torch.dtype = torch.float32, hidden: int = 16, ffn: int = 24) -> GroupedExperts:
    return GroupedExperts(5, hidden, ffn, seed=0, dtype=dtype)


def random_rows(rows: int, hidden: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, hidden, generator=torch.Generator().manual_seed(seed))


def loop_over_experts(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, offsets: list[int]) -> torch.Tensor:
    parts = []
    for e in range(gate_up.shape[0]):
        rows = x[offsets[e] : offsets[e + 1]]
        gate, up = (rows @ gate_up[e]).split(gate_up.shape[2] // 2, dim=1)
        parts.append((gate / (1 + torch.exp(-gate)) * up) @ down[e])
    return torch.cat(parts)


def run(
    experts: GroupedExperts, x: torch.Tensor, grad: torch.Tensor, offsets: list[int] = OFFSETS
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output and gradients of rows and weights, rows up to the last offset only."""
    experts.zero_grad()
    x = x.clone().requires_grad_()
    y = experts(x, torch.tensor(offsets))
    y.backward(grad.to(y.dtype))
    end = offsets[-1]
    return (
        y[:end].detach(),
        x.grad[:end],
        experts.gate_up_proj.grad.clone(),
        experts.down_proj.grad.clone(),
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_against_a_loop_in_float64(dtype: torch.dtype, tolerance: float) -> None:
    experts = make(dtype)
    x, grad = random_rows(USED, 16).to(dtype), random_rows(USED, 16, seed=1).to(dtype)
    got = run(experts, x, grad)

    leaves = [t.detach().double().requires_grad_() for t in (x, experts.gate_up_proj, experts.down_proj)]
    y = loop_over_experts(*leaves, OFFSETS)
    y.backward(grad.double())
    for mine, reference in zip(got, [y.detach(), *(leaf.grad for leaf in leaves)], strict=True):
        assert mine.dtype == dtype
        error = (mine.double() - reference).abs().max() / reference.abs().max()
        assert error < tolerance
    for idle in (0, 2, 4):
        assert (got[2][idle] == 0).all() and (got[3][idle] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("hidden", "ffn"), [(16, 24), (256, 512)])
def test_tail_rows_never_matter_whatever_they_hold(dtype: torch.dtype, hidden: int, ffn: int) -> None:
    experts = make(dtype, hidden, ffn)
    x, grad = random_rows(USED, hidden).to(dtype), random_rows(USED, hidden, seed=1).to(dtype)
    exact = run(experts, x, grad)
    assert all(t.isfinite().all() for t in exact)
    for tail in (1, 16, 300):
        for garbage in (0.0, 3.0, float("nan"), float("inf")):
            poison = torch.full((tail, hidden), garbage, dtype=dtype)
            got = run(experts, torch.cat([x, poison]), torch.cat([grad, poison]))
            assert all(torch.equal(a, b) for a, b in zip(got, exact, strict=True)), (tail, garbage)


def test_any_memory_layout() -> None:
    experts, x = make(), random_rows(USED, 16)
    dense = run(experts, x, torch.full((USED, 16), 2.0))
    strided = run(experts, x.t().contiguous().t(), torch.tensor(2.0).expand(USED, 16))
    assert all(torch.equal(a, b) for a, b in zip(dense, strided, strict=True))


def test_only_idle_experts_in_a_buffer_of_garbage() -> None:
    experts = make()
    garbage = torch.full((32, 16), float("nan"))
    y, x_grad, *weight_grads = run(experts, garbage, garbage, [0] * 6)
    assert y.shape == x_grad.shape == (0, 16)
    assert all((grad == 0).all() for grad in weight_grads)


def test_no_rows_keep_the_graph_connected() -> None:
    experts = make(torch.bfloat16)
    x = torch.zeros(0, 16, dtype=torch.bfloat16, requires_grad=True)
    y = experts(x, torch.zeros(6, dtype=torch.int64))
    assert y.shape == (0, 16) and y.dtype == torch.bfloat16
    y.sum().backward()
    assert x.grad.shape == (0, 16)
    for parameter in experts.parameters():
        assert parameter.grad.shape == parameter.shape and (parameter.grad == 0).all()


def test_recomputation() -> None:
    x, grad, offsets = random_rows(USED, 16), random_rows(USED, 16, seed=1), torch.tensor(OFFSETS)
    plain = run(make(), x, grad)
    experts = make()
    leaf = x.clone().requires_grad_()
    checkpoint(experts, leaf, offsets, use_reentrant=False).backward(grad)
    assert torch.equal(leaf.grad, plain[1])
    assert torch.equal(experts.gate_up_proj.grad, plain[2])
    assert torch.equal(experts.down_proj.grad, plain[3])


@pytest.mark.parametrize("rows", [0, USED])
def test_autocast_computes_in_its_dtype_with_fp32_weights(rows: int) -> None:
    experts, rounded = make(), make(torch.bfloat16)
    x = random_rows(rows, 16).requires_grad_()
    offsets = [min(offset, rows) for offset in OFFSETS]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = experts(x, torch.tensor(offsets))
    assert y.dtype == torch.bfloat16
    if rows:
        assert torch.equal(y, rounded(x.detach().bfloat16(), torch.tensor(offsets)))
    y.sum().backward()
    assert experts.gate_up_proj.grad.dtype == x.grad.dtype == torch.float32


def test_nothing_reads_the_device() -> None:
    experts = GroupedExperts(5, 16, 24, seed=0, dtype=torch.bfloat16, device="meta")
    x = torch.empty(64, 16, dtype=torch.bfloat16, device="meta", requires_grad=True)
    y = experts(x, torch.empty(6, dtype=torch.int64, device="meta"))
    y.backward(torch.empty_like(y))
    assert x.grad.shape == (64, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_initial_weights_follow_the_global_expert_number(dtype: torch.dtype) -> None:
    whole = GroupedExperts(4, 16, 8, seed=7, dtype=dtype)
    upper = GroupedExperts(2, 16, 8, seed=7, first_expert=2, dtype=dtype)
    assert torch.equal(whole.gate_up_proj[2:], upper.gate_up_proj)
    assert torch.equal(whole.down_proj[2:], upper.down_proj)
    assert not torch.equal(whole.gate_up_proj[0], whole.gate_up_proj[1])
    assert not torch.equal(whole.down_proj, GroupedExperts(4, 16, 8, seed=8, dtype=dtype).down_proj)
    exact = GroupedExperts(4, 16, 8, seed=7)
    assert torch.equal(whole.gate_up_proj, exact.gate_up_proj.to(dtype))
    for weight, fan_in in ((exact.gate_up_proj, 16), (exact.down_proj, 8)):
        assert weight.abs().max() <= fan_in**-0.5 and weight.abs().max() > 0.9 * fan_in**-0.5
    on_meta = GroupedExperts(4, 16, 8, seed=7, dtype=dtype, device="meta").to_empty(device="cpu")
    on_meta.reset_parameters()
    assert torch.equal(on_meta.down_proj, whole.down_proj)


def test_expert_parameters_are_marked() -> None:
    on_meta = GroupedExperts(2, 16, 8, device="meta")
    for experts in (make(), make().bfloat16(), copy.deepcopy(make()), on_meta.to_empty(device="cpu")):
        assert all(parameter.ep_expert for parameter in experts.parameters())
    assert not any(hasattr(p, "ep_expert") for p in SharedExpert(16, 8, seed=0).parameters())


def test_shared_expert() -> None:
    shared = SharedExpert(16, 24, seed=0)
    x, grad = random_rows(6, 16).requires_grad_(), random_rows(6, 16, seed=1)
    y = shared(x.view(2, 3, 16)).view(6, 16)
    y.backward(grad)
    leaves = [t.detach().double().requires_grad_() for t in (x, shared.gate_up_proj.T[None], shared.down_proj.T[None])]
    reference = loop_over_experts(*leaves, [0, 6])
    reference.backward(grad.double())
    pairs = [
        (y, reference),
        (x.grad, leaves[0].grad),
        (shared.gate_up_proj.grad, leaves[1].grad[0].T),
        (shared.down_proj.grad, leaves[2].grad[0].T),
    ]
    for mine, exact in pairs:
        torch.testing.assert_close(mine.double(), exact, rtol=1e-5, atol=1e-6)
    assert shared(torch.zeros(0, 16)).shape == (0, 16)


def test_bad_configuration() -> None:
    with pytest.raises(ConfigError, match="hidden_size must be a multiple of 8 for.*bfloat16.*got 12"):
        GroupedExperts(2, 12, 8, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="ffn_size must be a multiple of 4 for.*float32.*got 6"):
        GroupedExperts(2, 12, 6)
    with pytest.raises(ConfigError, match="num_local_experts must be an integer above 0, got 0"):
        GroupedExperts(0, 16, 8)
    with pytest.raises(ConfigError, match="ffn_size must be an integer above 0, got 8.0"):
        SharedExpert(16, 8.0)
    narrow = GroupedExperts(2, 12, 4, seed=0)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ConfigError, match="multiple of 8"):
        narrow(torch.zeros(4, 12), torch.tensor([0, 2, 4]))


def test_bad_arguments() -> None:
    experts, offsets = make(), torch.tensor(OFFSETS)
    with pytest.raises(ArgumentError, match=r"rows must be torch.float32 of.*hidden_size=16\].*bfloat16"):
        experts(torch.zeros(64, 16, dtype=torch.bfloat16), offsets)
    with pytest.raises(ArgumentError, match=r"rows must be.*got torch.float32 of shape \[64, 8\]"):
        experts(torch.zeros(64, 8), offsets)
    with pytest.raises(ArgumentError, match=r"num_local_experts \+ 1 = 6\], got \[5\]"):
        experts(torch.zeros(64, 16), offsets[:5])
    with pytest.raises(ArgumentError, match="one device, got cpu, meta and cpu"):
        experts(torch.zeros(64, 16), offsets.to("meta"))
