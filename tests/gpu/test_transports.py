"""Both transports on GPUs against the independent CPU reference, bit for bit: rows, sums, all gradients."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ep_comm
from tests import reference, steps
from tests.test_dispatch_combine import DTYPES, ROUTINGS, Spec

from .launch import RANKS, needs_gpus, run_gpu_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(280)]


def draw_specs(ep_size: int, count: int, seed: int) -> list[Spec]:
    """Random examples, more of them and larger than the CPU suite can afford."""
    rng = random.Random(seed)
    specs = []
    for _ in range(count):
        mxfp8 = rng.choice([(False, False), (True, True), (True, False), (False, True)])
        specs.append(
            Spec(
                ep_size=ep_size,
                local_experts=rng.randint(1, 6),
                top_k=rng.randint(1, 8),
                alignment=rng.choice([1, 16, 32, 128]),
                hidden=rng.choice([32, 96, 256, 2880] if any(mxfp8) else [2, 50, 96, 264, 2880]),
                dtype=rng.choice(list(DTYPES)),
                idx_dtype=rng.choice(["int32", "int64"]),
                token_counts=tuple(rng.choice([0, 1, 7, 40]) for _ in range(ep_size)),
                routing=rng.choice(ROUTINGS),
                dispatch_mxfp8=mxfp8[0],
                combine_mxfp8=mxfp8[1],
                scale_rounding=rng.choice(["rceil", "floor"]),
                apply_weights=rng.random() < 0.5,
                integers=False,
                tight_budget=True,
                seed=rng.randrange(2**31),
            )
        )
    return specs


def prepare(spec: Spec) -> tuple[list[list[list[int]]], list[reference.Layout], list[steps.StepInputs]]:
    topk_idx = spec.topk_idx()
    plan = reference.layouts(topk_idx, spec.num_experts, spec.alignment)
    idx_dtype = getattr(torch, spec.idx_dtype)
    return (
        topk_idx,
        plan,
        steps.make_inputs(plan, topk_idx, spec.top_k, spec.hidden, DTYPES[spec.dtype], idx_dtype, spec.seed),
    )


def moved(thing: Any, device: str) -> Any:
    """A dataclass with its tensors on ``device``."""
    values = {f.name: getattr(thing, f.name) for f in dataclasses.fields(thing)}
    return type(thing)(**{k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in values.items()})


def run_specs(rank: int, world_size: int, specs: list[Spec], transport: str) -> list[str]:
    """Names of everything that differs from the reference on this rank."""
    wrong = []
    for spec in specs:
        topk_idx, plan, inputs = prepare(spec)
        most = max(layout.required_rows for layout in plan)
        rounding = spec.scale_rounding
        want = steps.expected_step(
            plan,
            topk_idx,
            spec.num_experts,
            inputs,
            spec.apply_weights,
            rounding if spec.dispatch_mxfp8 else None,
            rounding if spec.combine_mxfp8 else None,
        )[rank]
        for mode in ("eager", "static"):
            config = dataclasses.replace(
                spec.config(mode, most), transport=transport, max_tokens_per_rank=max(1, *spec.token_counts)
            )
            with ep_comm.Dispatcher(config) as dispatcher:
                assert dispatcher.transport == (transport if world_size > 1 else "local")
                got = moved(steps.run_step(dispatcher, moved(inputs[rank], "cuda"), spec.apply_weights), "cpu")
                different = steps.differences(got, want, exact_dots=False)
                if different or dispatcher.overflowed:
                    wrong.append(f"{mode} {spec}: {[text[:300] for text in different]} {dispatcher.overflowed}")
    return wrong


@pytest.mark.parametrize("transport", ["collective", "symmetric"])
@needs_gpus(RANKS)
def test_several_gpus_equal_the_reference(transport: str) -> None:
    for rank, wrong in enumerate(run_gpu_ranks(run_specs, RANKS, draw_specs(RANKS, 16, seed=1), transport)):
        assert not wrong, f"rank {rank}: {len(wrong)} wrong\n" + "\n".join(wrong[:5])


@needs_gpus(RANKS)
def test_the_network_path_equals_the_reference() -> None:
    """Every rank a host of its own, as far as NCCL knows: its network transport instead of NVLink."""
    results = run_gpu_ranks(
        run_specs, RANKS, draw_specs(RANKS, 6, seed=3), "collective", env={"NCCL_HOSTID": "host{rank}"}
    )
    for rank, wrong in enumerate(results):
        assert not wrong, f"rank {rank}: {len(wrong)} wrong\n" + "\n".join(wrong[:5])


def run_beside_cpu(rank: int, world_size: int, specs: list[Spec], transport: str) -> list[str]:
    """What differs between NCCL and gloo, whose results the CPU tests compare with the reference."""
    gloo = dist.new_group(backend="gloo")
    wrong = []
    for spec in specs:
        _, plan, inputs = prepare(spec)
        most = max(layout.required_rows for layout in plan)
        for mode in ("eager", "static"):
            config = dataclasses.replace(
                spec.config(mode, most), transport=transport, max_tokens_per_rank=max(1, *spec.token_counts)
            )
            with ep_comm.Dispatcher(config, gloo) as there, ep_comm.Dispatcher(config) as here:
                assert there.transport == here.transport == transport
                want = steps.run_step(there, inputs[rank], spec.apply_weights)
                got = moved(steps.run_step(here, moved(inputs[rank], "cuda"), spec.apply_weights), "cpu")
                different = steps.differences(got, want)
                if different or here.overflowed:
                    wrong.append(f"{mode} {spec}: {[text[:300] for text in different]} {here.overflowed}")
    return wrong


@needs_gpus(4)
def test_two_hosts_of_gpus_equal_two_hosts_of_cpus() -> None:
    """The hierarchical transport on NCCL: half of the ranks on either host."""
    results = run_gpu_ranks(
        run_beside_cpu, 4, draw_specs(4, 8, seed=4), "hierarchical", env={"NCCL_HOSTID": "host{half}"}
    )
    for rank, wrong in enumerate(results):
        assert not wrong, f"rank {rank}: {len(wrong)} wrong\n" + "\n".join(wrong[:5])


@needs_gpus(1)
def test_one_gpu_equals_the_reference() -> None:
    (wrong,) = run_gpu_ranks(run_specs, 1, draw_specs(1, 16, seed=2), "auto")
    assert not wrong, f"{len(wrong)} wrong\n" + "\n".join(wrong[:5])


def same_dots(rank: int, world_size: int) -> bool:
    """The gradient of the weights: the kernel, the torch code on the GPU and on the CPU sum alike."""
    from ep_comm.rows import row_dot, scale_rows, weighted_backward

    for hidden in (32, 96, 2880, 7168):
        make = torch.Generator().manual_seed(hidden)
        y, g = (torch.randn(50, hidden, generator=make).bfloat16() for _ in range(2))
        w = torch.rand(50, generator=make)
        grads, dots = weighted_backward(y.cuda(), g.cuda(), w.cuda(), torch.tensor([50], device="cuda"))
        if not (torch.equal(dots.cpu(), row_dot(y, g)) and torch.equal(grads.cpu(), scale_rows(g, w))):
            return False
        if not torch.equal(row_dot(y.cuda(), g.cuda()).cpu(), row_dot(y, g)):
            return False
    return True


@needs_gpus(1)
def test_weight_gradients_have_the_bits_of_the_cpu() -> None:
    assert run_gpu_ranks(same_dots, 1) == [True]


def interleaved(rank: int, world_size: int, transport: str) -> bool:
    """Two dispatchers of different shapes, handles combined in another order than dispatched."""
    configs = [
        ep_comm.EPConfig(
            num_experts=experts, top_k=2, hidden_size=hidden, max_tokens_per_rank=tokens, transport=transport, mode=mode
        )
        for experts, hidden, tokens, mode in ((4, 64, 32, "static"), (8, 2880, 100, "eager"))
    ]
    a, b = (ep_comm.Dispatcher(config) for config in configs)
    handles = []
    for seed in range(4):
        for dispatcher in (a, b):
            make = torch.Generator().manual_seed(10 * seed + rank)
            config = dispatcher.config
            count = int(torch.randint(1, config.max_tokens_per_rank, (), generator=make))
            x = torch.randn(count, config.hidden_size, generator=make).bfloat16().cuda()
            idx = torch.rand(count, config.num_experts, generator=make).topk(2).indices.cuda()
            d = dispatcher.dispatch(x, idx, torch.ones(count, 2, device="cuda"))
            handles.append((dispatcher, x, d))
    good = True
    for dispatcher, x, d in reversed(handles):
        good &= torch.equal(dispatcher.combine(d.tokens, d.handle), 2 * x)
    a.close()
    b.close()
    return good


@pytest.mark.parametrize("transport", ["collective", "symmetric"])
@needs_gpus(RANKS)
def test_handles_in_flight(transport: str) -> None:
    assert run_gpu_ranks(interleaved, RANKS, transport) == [True] * RANKS


def on_two_streams(rank: int, world_size: int, transport: str) -> bool:
    """Two dispatchers of a group, each on a stream of its own, with nothing between them but the transport."""
    tokens, hidden, experts = 4096, 1024, 8 * world_size
    sides = []
    for seed in (0, 1):
        config = ep_comm.EPConfig(
            num_experts=experts,
            top_k=4,
            hidden_size=hidden,
            max_tokens_per_rank=tokens,
            transport=transport,
            mode="static",
            capacity_factor=float(world_size),
            dispatch_forward_dtype=("bf16", "mxfp8")[seed],
        )
        make = torch.Generator().manual_seed(10 * seed + rank)
        x = torch.randint(-4, 5, (tokens, hidden), generator=make).bfloat16().cuda().requires_grad_()
        idx = torch.rand(tokens, experts, generator=make).topk(4).indices.cuda()
        weights = torch.ones(tokens, 4, device="cuda")
        sides.append((ep_comm.Dispatcher(config), torch.cuda.Stream(), x, idx, weights))
    torch.cuda.synchronize()
    good = True
    for turn in range(10):
        for dispatcher, stream, x, idx, weights in sides:
            with torch.cuda.stream(stream):
                d = dispatcher.dispatch(x, idx, weights)
                out = dispatcher.combine(d.tokens, d.handle)
                (grad,) = torch.autograd.grad(out, x, out.detach())
                # Small whole numbers are exact in every format: each of four experts gives the token back.
                good &= bool((out == 4 * x).all() & (grad == 16 * x).all()) if turn == 9 else True
    torch.cuda.synchronize()
    for dispatcher, *_ in sides:
        assert not dispatcher.overflowed
        dispatcher.check()
        dispatcher.close()
    return good


@pytest.mark.parametrize("transport", ["collective", "symmetric"])
@needs_gpus(RANKS)
def test_streams_side_by_side(transport: str) -> None:
    assert run_gpu_ranks(on_two_streams, RANKS, transport) == [True] * RANKS


def stop_early(rank: int, world_size: int) -> str:
    config = ep_comm.EPConfig(
        num_experts=4,
        top_k=1,
        hidden_size=64,
        max_tokens_per_rank=8,
        mode="static",
        transport="symmetric",
        timeout_seconds=2.0,
    )
    dispatcher = ep_comm.Dispatcher(config)
    x, idx, w = torch.ones(8, 64, device="cuda"), torch.zeros(8, 1, dtype=torch.int64, device="cuda"), None
    w = torch.ones(8, 1, device="cuda")
    dispatcher.dispatch(x, idx, w)
    dispatcher.check()
    if rank == 1:
        return "stopped"
    try:
        dispatcher.dispatch(x, idx, w)
        dispatcher.check()
    except ep_comm.PeerLostError as error:
        return str(error)
    return "no error"


@needs_gpus(RANKS)
def test_a_peer_that_stops_is_named() -> None:
    answers = run_gpu_ranks(stop_early, RANKS)
    assert answers.pop(1) == "stopped"
    assert all("rank 1 did not arrive within timeout_seconds=2.0" in answer for answer in answers), answers


@needs_gpus(RANKS)
def test_auto_takes_the_network_between_hosts() -> None:
    names = run_gpu_ranks(transport_name, RANKS, env={"NCCL_HOSTID": "host{rank}"})
    assert names == ["collective"] * RANKS
    assert run_gpu_ranks(transport_name, RANKS) == ["symmetric"] * RANKS


def transport_name(rank: int, world_size: int) -> str:
    config = ep_comm.EPConfig(num_experts=4, top_k=1, hidden_size=64, max_tokens_per_rank=8)
    with ep_comm.Dispatcher(config) as dispatcher:
        x = torch.ones(3, 64, device="cuda")
        d = dispatcher.dispatch(x, torch.tensor([[0], [2], [3]], device="cuda"), torch.ones(3, 1, device="cuda"))
        assert torch.equal(dispatcher.combine(d.tokens, d.handle), x)
        return dispatcher.transport
