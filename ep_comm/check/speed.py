"""The time of a dispatch and of a combine at one standard shape, for each transport and wire format."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..config import EPConfig, round_up
from ..dispatcher import Dispatcher
from ..distributed import Env

__all__ = ["Shape", "TransportSpeed", "measure_transport", "standard_shape", "summarise"]

_ROUNDS = 9


@dataclass(frozen=True)
class Shape:
    """Sizes of the timed call: tokens a rank, hidden size, experts of the group, slots a token."""

    tokens: int
    hidden_size: int
    num_experts: int
    top_k: int


@dataclass(frozen=True)
class TransportSpeed:
    """Medians over the rounds of the slowest rank's time, and what crossed between ranks a rank and round.

    Attributes:
        dispatch_gb_per_s, combine_gb_per_s: bytes of token rows that left the busiest rank, by that time.
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
    env: Env, shape: Shape, transport: str, wire: str, seconds: float, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Time static mode on uniform routing, launched call by call. Collective.

    Returns:
        This rank's seconds of every round, and its bytes a round, for :func:`summarise`.
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
    rounds: list[tuple[float, float]] = []
    with Dispatcher(config, env.group, name=f"{transport} timing") as dispatcher, torch.no_grad():
        dispatcher.dispatch(tokens, topk_idx, topk_weights)
        if dispatcher.overflowed:
            dispatcher.grow(dispatcher.required_rows)
        sent_before = dispatcher.tokens_sent
        deadline = time.perf_counter() + seconds
        for number in range(_ROUNDS + 2):
            progress(f"round {number}")
            _line_up(env, deadline)
            started = _clock(env)
            d = dispatcher.dispatch(tokens, topk_idx, topk_weights)
            dispatch_seconds = _clock(env) - started
            _line_up(env, deadline)
            started = _clock(env)
            dispatcher.combine(d.tokens, d.handle)
            rounds.append((dispatch_seconds, _clock(env) - started))
            if _line_up(env, deadline) and number >= 2:
                break
        sent = (dispatcher.tokens_sent - sent_before) // len(rounds)
        return {
            "rounds": rounds[2:],
            "dispatch_bytes": sent * dispatcher.wire_row_bytes("dispatch_forward"),
            "combine_bytes": sent * dispatcher.wire_row_bytes("combine_forward"),
        }


def summarise(transport: str, wire: str, by_rank: Sequence[dict[str, Any]]) -> TransportSpeed:
    """From the ranks' :func:`measure_transport` to one line."""
    slowest = [[max(times) for times in zip(*of_round, strict=True)] for of_round in _rounds(by_rank)]
    dispatch, combine = (statistics.median(times) for times in zip(*slowest, strict=True))
    there = max(each["dispatch_bytes"] for each in by_rank)
    back = max(each["combine_bytes"] for each in by_rank)
    return TransportSpeed(transport, wire, dispatch * 1e6, combine * 1e6, there / dispatch / 1e9, back / combine / 1e9)


def _rounds(by_rank: Sequence[dict[str, Any]]) -> list[tuple[tuple[float, float], ...]]:
    return list(zip(*(each["rounds"] for each in by_rank), strict=True))


def _line_up(env: Env, deadline: float) -> bool:
    """Let all ranks meet; says whether time is over on any of them."""
    over = torch.tensor(float(time.perf_counter() > deadline), device=env.device)
    dist.all_reduce(over, op=dist.ReduceOp.MAX, group=env.group)
    return bool(over)


def _clock(env: Env) -> float:
    if env.device.type == "cuda":
        torch.cuda.synchronize(env.device)
    return time.perf_counter()
