"""The inputs of one shape, and what plain torch says must come out of them.

Expert outputs, and the gradients that go back, are the delivered rows times a factor of their expert. So the sums that
must come back can be computed by a token's owner alone, and a row that was summed into the wrong token or came
from the wrong expert shows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from ..mxfp8 import MXFP8Tensor, dequantize_mxfp8, quantize_mxfp8
from ..plan import segment_offsets
from .options import Shape
from .routing import RoutingSet, draw_sets

__all__ = ["Item", "Work", "expert_output", "make_work"]

_DTYPE = torch.bfloat16
_HALF_UNIT = 2.0**-9
"""Largest relative error of one rounding to bf16."""


@dataclass(frozen=True)
class Item:
    """One of the input sets that are used in turn; tensors on this rank's device.

    Attributes:
        routing: of all ranks, on the CPU.
        tokens_TH: bf16 rows.
        topk_idx_TK: int64 expert ids.
        topk_weights_TK: fp32.
        grad_TH: bf16, gradient of the combined rows.
    """

    routing: RoutingSet
    tokens_TH: Tensor
    topk_idx_TK: Tensor
    topk_weights_TK: Tensor
    grad_TH: Tensor


def expert_output(rows_RH: Tensor, experts_R: Tensor) -> Tensor:
    """What stands for the experts: every row times a factor of its expert that bf16 holds exactly.

    Args:
        rows_RH: bf16.
        experts_R: id in the group of each row's expert.
    """
    factor_R = 0.5 + (experts_R % 8) / 8
    return rows_RH * factor_R.to(rows_RH.dtype).unsqueeze(-1)


@dataclass
class Work:
    """All input sets of a shape on this rank.

    Attributes:
        shape, rank, ep_size: what, where.
        items: the sets.
        group: for the exchange of inputs that the reference needs.
    """

    shape: Shape
    rank: int
    ep_size: int
    items: list[Item]
    group: dist.ProcessGroup | None
    _everybody: dict[tuple[int, str], Tensor] = field(default_factory=dict)

    def check_rows(
        self,
        number: int,
        direction: str,
        dtype: str,
        rows_RH: Tensor | MXFP8Tensor,
        weights_R: Tensor | None,
        alignment: int,
        least_segment: int = 0,
    ) -> str | None:
        """What is wrong with rows delivered to this rank's experts, or None. Bit for bit, padding included.

        Args:
            number: of the set.
            direction: ``"dispatch"`` or ``"combine_backward"``.
            dtype: of :data:`ep_comm.bench.options.DTYPES`.
            rows_RH: delivered; rows behind the last segment must be zero.
            weights_R: delivered beside them, or None where the contender delivers none.
            alignment: of the segments.
            least_segment: rows of an expert without tokens.
        """
        item = self.items[number]
        source_N, row_N, required = self._layout(item, alignment, least_segment)
        source = "tokens_TH" if direction == "dispatch" else "grad_TH"
        sent_MH = self._from_everybody(number, source).flatten(0, 1)
        if dtype != "bf16":
            sent_MH = dequantize_mxfp8(quantize_mxfp8(sent_MH), _DTYPE)
        if isinstance(rows_RH, MXFP8Tensor):
            rows_RH = dequantize_mxfp8(rows_RH, _DTYPE)
        if rows_RH.shape[0] < required or rows_RH.shape[1:] != sent_MH.shape[1:]:
            return f"rows have the shape {tuple(rows_RH.shape)}, needed are {(required, sent_MH.shape[1])}"
        expected_RH = rows_RH.new_zeros(rows_RH.shape)
        expected_RH[row_N] = sent_MH[source_N // self.shape.top_k].to(rows_RH.dtype)
        # As integers: a NaN equals itself, and a zero's sign counts.
        if not torch.equal(rows_RH.view(torch.int16), expected_RH.view(torch.int16)):
            bad = (rows_RH != expected_RH).any(1).sum().item()
            return f"{bad} of {rows_RH.shape[0]} rows differ"
        if weights_R is not None:
            expected_R = weights_R.new_zeros(weights_R.shape)
            expected_R[row_N] = self._from_everybody(number, "topk_weights_TK").flatten()[source_N]
            if not torch.equal(weights_R, expected_R):
                return f"{(weights_R != expected_R).sum().item()} routing weights differ"
        return None

    def check_sums(self, number: int, sums_TH: Tensor, scalars_TK: Tensor | None, exact: bool) -> str | None:
        """What is wrong with sums that came back to this rank's tokens, or None.

        Args:
            sums_TH: of :func:`expert_output` of each token's rows.
            scalars_TK: what came back unsummed: the routing weights that went out; or None.
            exact: bit for bit in the order of docs/architecture.md; otherwise within the rounding of bf16 sums in any
                order.
        """
        item = self.items[number]
        owner_TK = item.topk_idx_TK // (self.shape.experts // self.ep_size)
        total_TH = torch.zeros(item.tokens_TH.shape, device=sums_TH.device)
        size_TH = torch.zeros_like(total_TH)
        for rank in range(self.ep_size):
            partial_TH = torch.zeros_like(total_TH)
            for slot in range(self.shape.top_k):
                term_TH = expert_output(item.tokens_TH, item.topk_idx_TK[:, slot]).float()
                partial_TH += torch.where((owner_TK[:, slot] == rank).unsqueeze(1), term_TH, 0.0)
                if not exact and rank == 0:
                    size_TH += term_TH.abs()
            total_TH += partial_TH.to(_DTYPE).float()
        expected_TH = total_TH.to(_DTYPE)
        if sums_TH.shape != expected_TH.shape:
            return f"sums have the shape {tuple(sums_TH.shape)}, needed are {tuple(expected_TH.shape)}"
        if exact:
            bad_TH = sums_TH != expected_TH
        else:
            # At worst each addition, on either side, rounds to bf16.
            most = (self.shape.top_k + self.ep_size + 1) * _HALF_UNIT
            bad_TH = ~((sums_TH.float() - expected_TH.float()).abs() <= most * size_TH)
        if bool(bad_TH.any()):
            return f"{bad_TH.any(1).sum().item()} of {sums_TH.shape[0]} sums differ"
        if scalars_TK is not None and not torch.equal(scalars_TK, item.topk_weights_TK):
            return f"{(scalars_TK != item.topk_weights_TK).sum().item()} gradients of routing weights differ"
        return None

    def _layout(self, item: Item, alignment: int, least_segment: int) -> tuple[Tensor, Tensor, int]:
        """For this rank's rows in order: flat (rank, token, slot) of the source, row number; and all rows needed."""
        device = item.tokens_TH.device
        local = self.shape.experts // self.ep_size
        flat_S = item.routing.idx_PTK.flatten()
        counts_E = torch.bincount(flat_S, minlength=self.shape.experts)
        first = int(counts_E[: self.rank * local].sum())
        counts_L = counts_E[self.rank * local : (self.rank + 1) * local]
        source_N = torch.sort(flat_S, stable=True).indices[first : first + int(counts_L.sum())]
        starts_L1 = segment_offsets(counts_L.clamp_min(least_segment), alignment)
        within_N = torch.arange(len(source_N)) - (counts_L.cumsum(0) - counts_L).repeat_interleave(counts_L)
        row_N = starts_L1[:-1].repeat_interleave(counts_L) + within_N
        return source_N.to(device), row_N.to(device), int(starts_L1[-1])

    def _from_everybody(self, number: int, name: str) -> Tensor:
        """A tensor of a set, of all ranks ``[P, ...]``."""
        key = (number, name)
        if key not in self._everybody:
            own = getattr(self.items[number], name)
            parts = [torch.empty_like(own) for _ in range(self.ep_size)]
            if self.ep_size > 1:
                dist.all_gather(parts, own, group=self.group)
            else:
                parts = [own]
            self._everybody[key] = torch.stack(parts)
        return self._everybody[key]

    def exchange(self, directions: tuple[str, ...]) -> None:
        """Fetch what the checks need from the other ranks. Collective; the checks then talk to nobody."""
        for number in range(len(self.items)):
            if "dispatch" in directions:
                self._from_everybody(number, "tokens_TH")
                self._from_everybody(number, "topk_weights_TK")
            if "combine_backward" in directions:
                self._from_everybody(number, "grad_TH")


def make_work(
    shape: Shape, rank: int, ep_size: int, device: torch.device, group: dist.ProcessGroup | None, seed: int, skew: float
) -> Work:
    """Draw all input sets of ``shape``: as many as it takes for rows to have left the L2 cache when used again."""
    row_bytes = shape.tokens * shape.hidden * _DTYPE.itemsize
    cache = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
    count = max(2, min(4, -(-2 * cache // row_bytes)))
    make = torch.Generator(device).manual_seed(1_000_003 * (seed + 1) + rank)
    items = []
    for routing in draw_sets(shape, ep_size, count, seed, skew):
        tokens_TH, grad_TH = (
            torch.randn(shape.tokens, shape.hidden, generator=make, device=device).to(_DTYPE) for _ in range(2)
        )
        weights_TK = torch.rand(shape.tokens, shape.top_k, generator=make, device=device)
        items.append(Item(routing, tokens_TH, routing.idx_PTK[rank].to(device), weights_TK, grad_TH))
    return Work(shape, rank, ep_size, items, group)
