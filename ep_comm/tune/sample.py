"""What a trace says about the target: the rows each layer needed on its busiest rank, step by step."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch

from ..config import worst_case_rows
from ..plan import required_rows
from .placement import Placement

__all__ = ["Sample", "busiest_rank_rows"]


@dataclass(frozen=True)
class Sample:
    """Demand of all layers in each step, for one target.

    Attributes:
        layers: names, in the order of the model.
        steps: int64 ``[S]``, training step of each entry.
        rows_SL: int64, rows that the busiest rank needs, padding included: what the library's plan computes.
        pairs_SL: int64, most tokens between two ranks.
        pairs_measured: False where only counts were given, and ``pairs_SL`` is an upper bound.
        ep_size, num_experts, top_k, alignment: of the target.
        tokens_per_rank: most tokens of a rank in one dispatch.
        load_LE: int64 (token, slot) pairs of each expert over the whole trace.
        load_LP: the same for each rank.
        source: ``"steps"`` (as traced), ``"assembled"`` (batches put together) or ``"model"`` (simulated).
        notes: what the user should know about how it came about.
    """

    layers: list[str]
    steps: np.ndarray
    rows_SL: np.ndarray
    pairs_SL: np.ndarray
    pairs_measured: bool
    ep_size: int
    num_experts: int
    top_k: int
    alignment: int
    tokens_per_rank: int
    load_LE: np.ndarray
    load_LP: np.ndarray
    source: str
    notes: list[str] = field(default_factory=list)

    @property
    def num_steps(self) -> int:
        """Entries of the sample."""
        return self.rows_SL.shape[0]

    @property
    def worst_case_rows(self) -> int:
        """The most rows any routing can need on one rank."""
        pairs = self.ep_size * self.tokens_per_rank * self.top_k
        return worst_case_rows(pairs, self.num_experts // self.ep_size, self.alignment)

    @property
    def mean_load(self) -> float:
        """Rows of a rank under even routing, without padding: ``tokens_per_rank x top_k``."""
        return float(self.tokens_per_rank * self.top_k)

    def part(self, start: int, stop: int) -> Sample:
        """The entries ``[start, stop)``."""
        cut = slice(start, stop)
        return replace(self, steps=self.steps[cut], rows_SL=self.rows_SL[cut], pairs_SL=self.pairs_SL[cut])


def busiest_rank_rows(counts_XLE: np.ndarray, placement: Placement, alignment: int) -> np.ndarray:
    """Rows, padding included, that the busiest rank needs: ``[X, L]`` for counts ``[X, L, E]`` summed over sources.

    This is :func:`ep_comm.plan.required_rows`, the code the dispatcher runs, after the experts were renumbered so
    that every rank's are contiguous.
    """
    ordered = np.take_along_axis(counts_XLE, placement.order_LE[None], axis=2)
    rows_XLP = required_rows(torch.from_numpy(np.ascontiguousarray(ordered)), placement.ep_size, alignment)
    return rows_XLP.amax(-1).numpy()
