"""Seeded routing, the same for every contender, and what it moves.

``uniform``: every token chooses its ``top_k`` experts at random, all alike. ``skewed``: without repetition from a
Zipf law, the n-th most popular expert having the weight ``n ** -skew``; which experts are popular is shuffled over
the ranks with the seed. Choosing without repetition from a law is the Gumbel top-k trick: add Gumbel noise to the
log weights, take the largest ``top_k``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .options import Shape

__all__ = ["RoutingSet", "busiest_link_rows", "draw_experts", "draw_sets"]


def draw_experts(shape: Shape, rank: int, number: int, seed: int, skew: float) -> Tensor:
    """Expert ids of one rank's tokens in set ``number``, int64 ``[T, K]``; on the CPU, so that all devices draw alike.

    The popular experts are the same on all ranks and in all sets of a seed.
    """
    law = torch.zeros(shape.experts)
    if shape.routing == "skewed":
        popularity = torch.randperm(shape.experts, generator=torch.Generator().manual_seed(seed)) + 1
        law = -skew * popularity.log()
    make = torch.Generator().manual_seed(1_000_003 * (seed + 1) + 1009 * number + rank)
    uniform = torch.rand(shape.tokens, shape.experts, generator=make).clamp_(1e-20, 1 - 1e-7)
    return (law - (-uniform.log()).log()).topk(shape.top_k, dim=1).indices


@dataclass(frozen=True)
class RoutingSet:
    """One routing of all ranks, with what it moves.

    Attributes:
        idx_PTK: int64 ``[P, T, K]`` on the CPU.
        num_experts: of the group.
    """

    idx_PTK: Tensor
    num_experts: int

    @property
    def ep_size(self) -> int:
        """Ranks."""
        return self.idx_PTK.shape[0]

    def owners_PTK(self) -> Tensor:
        """Rank of every slot's expert."""
        return self.idx_PTK // (self.num_experts // self.ep_size)

    def crossing_tokens_PP(self) -> Tensor:
        """int64 ``[source, destination]``: tokens with an expert on the destination; zero on the diagonal."""
        needs = torch.zeros(*self.idx_PTK.shape[:2], self.ep_size, dtype=torch.bool)
        needs.scatter_(2, self.owners_PTK(), True)
        return _without_diagonal(needs.sum(1))

    def crossing_pairs_PP(self) -> Tensor:
        """int64 ``[source, destination]``: (token, expert) pairs; zero on the diagonal."""
        owners = self.owners_PTK().flatten(1)
        counts = torch.stack([torch.bincount(row, minlength=self.ep_size) for row in owners])
        return _without_diagonal(counts)

    def imbalance(self) -> float:
        """(token, expert) pairs of the busiest rank over the mean."""
        load_P = torch.bincount(self.owners_PTK().flatten(), minlength=self.ep_size).double()
        return float(load_P.max() / load_P.mean())


def busiest_link_rows(rows_PP: Tensor) -> int:
    """The most rows that any rank sends, or receives: what the slowest link has to carry in one direction."""
    return int(max(rows_PP.sum(1).max(), rows_PP.sum(0).max()))


def draw_sets(shape: Shape, ep_size: int, count: int, seed: int, skew: float) -> list[RoutingSet]:
    """``count`` different routings of all ranks."""
    return [
        RoutingSet(
            torch.stack([draw_experts(shape, rank, number, seed, skew) for rank in range(ep_size)]),
            shape.experts,
        )
        for number in range(count)
    ]


def _without_diagonal(rows_PP: Tensor) -> Tensor:
    return rows_PP - torch.diag(rows_PP.diagonal())
