"""The time of a dispatch and of a combine at one standard shape, for each transport and wire format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..bench.timing import GraphCall, Timer, median_of_slowest
from ..config import EPConfig, round_up
from ..dispatcher import Dispatcher
from ..distributed import Env

__all__ = ["Shape", "TransportSpeed", "measure_transport", "standard_shape", "summarise"]


@dataclass(frozen=True)
class Shape:
    """Sizes of the timed call: tokens a rank, hidden size, experts of the group, slots a token."""

    tokens: int
    hidden_size: int
    num_experts: int
    top_k: int


@dataclass(frozen=True)
class TransportSpeed:
    """Medians of the slowest rank's time.

    Attributes:
        dispatch_gb_per_s, combine_gb_per_s: token rows that the busiest rank has for other ranks, one for each (token,
            rank), in bytes, by that time.
    """

    transport: str
    wire: str
    dispatch_us: float
    combine_us: float
    dispatch_gb_per_s: float
    combine_gb_per_s: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def standard_shape(env: Env) -> Shape:
    """Of a layer of a large model on GPUs, of a toy on CPUs."""
    if env.device.type == "cuda":
        return Shape(4096, 7168, round_up(256, env.world_size), 8)
    return Shape(256, 1024, 4 * env.world_size, min(4, 4 * env.world_size))


def measure_transport(
    env: Env,
    shape: Shape,
    transport: str,
    wire: str,
    seconds: float,
    progress: Callable[[str], None],
    *,
    graphs: bool = False,
) -> dict[str, Any]:
    """Time static mode on uniform routing. Collective.

    Args:
        graphs: each operation is captured in a CUDA graph, so that launching it is not what is measured.

    Returns:
        This rank's microseconds of every call, and its bytes a call, for :func:`summarise`.
    """
    make = torch.Generator().manual_seed(env.rank)
    tokens = torch.randn(shape.tokens, shape.hidden_size, generator=make).to(env.device, torch.bfloat16)
    topk_idx = torch.rand(shape.tokens, shape.num_experts, generator=make).topk(shape.top_k, dim=1).indices
    topk_idx = topk_idx.to(env.device)
    topk_weights = torch.rand(shape.tokens, shape.top_k, generator=make).to(env.device)
    config = EPConfig(
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        hidden_size=shape.hidden_size,
        max_tokens_per_rank=shape.tokens,
        mode="static",
        capacity_factor=1.25,
        dispatch_forward_dtype=wire,
        combine_backward_dtype=wire,
        transport=transport,
    )
    with Dispatcher(config, env.group, name=f"{transport} timing") as dispatcher, torch.no_grad():
        d = dispatcher.dispatch(tokens, topk_idx, topk_weights)
        if dispatcher.overflowed:
            dispatcher.grow(dispatcher.required_rows)
            d = dispatcher.dispatch(tokens, topk_idx, topk_weights)
        sent_before = dispatcher.tokens_sent
        dispatcher.dispatch(tokens, topk_idx, topk_weights)
        sent = dispatcher.tokens_sent - sent_before
        calls = (
            lambda: dispatcher.dispatch(tokens, topk_idx, topk_weights).tokens,
            lambda: dispatcher.combine(d.tokens, d.handle),
        )
        with _as_graphs(env, dispatcher, calls) if graphs else nullcontext(calls) as timed:
            progress("timing")
            times = [_time(env, call, seconds / 2) for call in timed]
        return {
            "times": times,
            "dispatch_bytes": sent * dispatcher.wire_row_bytes("dispatch_forward"),
            "combine_bytes": sent * dispatcher.wire_row_bytes("combine_forward"),
        }


@contextmanager
def _as_graphs(env: Env, dispatcher: Dispatcher, calls: Sequence[Callable[[], Any]]) -> Iterator[list[GraphCall]]:
    """The calls captured in CUDA graphs, after they have run as they are."""
    stream, pool = torch.cuda.Stream(env.device), torch.cuda.graph_pool_handle()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls * 2:
            call()
    dispatcher.prepare_capture()
    torch.cuda.synchronize(env.device)
    captured: list[GraphCall] = []
    try:
        for call in calls:
            captured.append(GraphCall(call, stream, pool))
        yield captured
    finally:
        torch.cuda.synchronize(env.device)
        for graph in captured:
            graph.reset()


def _time(env: Env, call: Callable[[], Any], seconds: float) -> list[float]:
    """Microseconds of as many calls as fit into the time, the same number on all ranks."""
    probe = torch.tensor(max(Timer(env.device, 1, 1)([call], env.group)), device=env.device)
    dist.all_reduce(probe, op=dist.ReduceOp.MAX, group=env.group)
    iterations = max(3, min(20, int(seconds * 1e6 / max(float(probe), 1.0))))
    return Timer(env.device, iterations, 1)([call], env.group)


def summarise(transport: str, wire: str, by_rank: Sequence[dict[str, Any]]) -> TransportSpeed:
    """From the ranks' :func:`measure_transport` to one line."""
    dispatch_us, combine_us = (median_of_slowest([each["times"][which] for each in by_rank]) for which in (0, 1))
    there = max(each["dispatch_bytes"] for each in by_rank)
    back = max(each["combine_bytes"] for each in by_rank)
    return TransportSpeed(transport, wire, dispatch_us, combine_us, there / dispatch_us / 1e3, back / combine_us / 1e3)
