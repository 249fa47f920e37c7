"""The routing plan: who sends which token to whom, and on which row everything lands.

Each rank counts its (token, slot) pairs per expert and its tokens per destination rank. One
all-gather makes the counts of all ranks known to every rank, and from there on everything is derived
locally, on the device, without a loop over tokens, experts or ranks:

    counts_PE          rows from source rank p for expert e
    expert offsets     running sum of the segments' sizes, each rounded up to the alignment
    required rows      end of the last segment, for every rank: the demand, known before data moves
    row of a slot      its expert's offset + the expert's rows from lower ranks + its own position

Letters: T tokens, K slots, E experts, L experts of a rank, P ranks, G hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .config import EPConfig, round_up
from .cuda.kernels import cuda_kernels
from .cuda.routing import derive_plan, local_routing, routing_fits, write_message
from .status import HEADER_WORDS, FaultCode, Header, Word

if TYPE_CHECKING:
    from .transport.hosts import Hosts

__all__ = [
    "CountMatrix",
    "CountedPlan",
    "LocalRouting",
    "RoutingPlan",
    "Sizing",
    "make_plan",
    "required_rows",
    "segment_offsets",
]


def segment_offsets(counts_XL: Tensor, alignment: int) -> Tensor:
    """Start of every expert's segment, and behind the last one its end.

    Args:
        counts_XL: rows of each expert, integer, any leading shape.
        alignment: every segment is padded to a multiple of it.

    Returns:
        int64 ``[..., L + 1]``: running sum of ``ceil(count / alignment) * alignment``, starting at 0.
    """
    padded_XL = -(-counts_XL.long() // alignment) * alignment
    return torch.nn.functional.pad(padded_XL.cumsum(-1), (1, 0))


def required_rows(counts_XE: Tensor, ep_size: int, alignment: int) -> Tensor:
    """Rows, padding included, that a routing needs on every rank.

    Args:
        counts_XE: (token, slot) pairs of each expert summed over source ranks, integer ``[..., E]``.
        ep_size: ranks; rank ``r`` owns the experts ``[r * E / ep_size, (r + 1) * E / ep_size)``.
        alignment: segment alignment.

    Returns:
        int64 ``[..., ep_size]``.
    """
    counts_XPL = counts_XE.unflatten(-1, (ep_size, counts_XE.shape[-1] // ep_size))
    return segment_offsets(counts_XPL, alignment)[..., -1]


@dataclass(frozen=True)
class LocalRouting:
    """What one rank knows about its own tokens before any exchange."""

    idx_TK: Tensor
    """int64 expert ids; ids out of range are replaced by -1."""
    counts_E: Tensor
    """int64, (token, slot) pairs of each expert."""
    position_TK: Tensor
    """int64, how many earlier pairs (token-major, slot-minor) of this rank go to the same expert."""
    needs_TP: Tensor
    """bool, whether the token has an expert on the rank."""
    pair_tokens_P: Tensor
    """int64, tokens that go to each rank."""
    fault: Tensor
    """int32 [5]: status words of the first id out of range, zeros where all are good."""

    @classmethod
    def build(cls, topk_idx_TK: Tensor, num_experts: int, ep_size: int) -> LocalRouting:
        """Counts and positions of ``topk_idx_TK`` (int32 or int64 ``[T, K]``, -1 = no expert)."""
        num_tokens, top_k = topk_idx_TK.shape
        kernels = cuda_kernels(topk_idx_TK.device)
        if kernels is not None and routing_fits(kernels, num_experts):
            return cls(*local_routing(kernels, topk_idx_TK.contiguous(), num_experts, ep_size))
        raw_TK = topk_idx_TK.long()
        bad_TK = (raw_TK < -1) | (raw_TK >= num_experts)
        idx_TK = raw_TK.masked_fill(bad_TK, -1)

        # Absent slots count for an expert E of their own, so that no shape depends on the data.
        key_S = idx_TK.flatten().remainder(num_experts + 1)
        ones_S = torch.ones_like(key_S)
        counts_X = torch.zeros(num_experts + 1, dtype=torch.int64, device=raw_TK.device)
        counts_X.scatter_add_(0, key_S, ones_S)
        order_S = torch.sort(key_S, stable=True).indices
        start_X = counts_X.cumsum(0) - counts_X
        place_S = torch.arange(key_S.numel(), device=raw_TK.device) - start_X[key_S[order_S]]
        position_S = torch.empty_like(place_S).scatter_(0, order_S, place_S)

        rank_TK = torch.where(idx_TK >= 0, idx_TK // (num_experts // ep_size), ep_size)
        needs_TX = torch.zeros(num_tokens, ep_size + 1, dtype=torch.bool, device=raw_TK.device)
        needs_TP = needs_TX.scatter_(1, rank_TK, True)[:, :ep_size]
        return cls(
            idx_TK=idx_TK,
            counts_E=counts_X[:num_experts],
            position_TK=position_S.view(num_tokens, top_k),
            needs_TP=needs_TP,
            pair_tokens_P=needs_TP.sum(0),
            fault=_first_bad_id(raw_TK, bad_TK),
        )


def _first_bad_id(raw_TK: Tensor, bad_TK: Tensor) -> Tensor:
    """Status words (code, token, slot, lower and upper half of the id) of the first bad id, int32 ``[5]``."""
    top_k = raw_TK.shape[1]
    if raw_TK.numel() == 0:
        return torch.zeros(5, dtype=torch.int32, device=raw_TK.device)
    first = bad_TK.flatten().to(torch.uint8).argmax()
    found = bad_TK.any()
    bad_id = raw_TK.flatten().gather(0, first.view(1))[0]
    # Sign-extended so that both halves fit an int32.
    low = (bad_id << 32) >> 32
    code = torch.full_like(first, int(FaultCode.EXPERT_ID))
    words = torch.stack([code, first // top_k, first % top_k, low, bad_id >> 32])
    return (words * found).to(torch.int32)


class CountMatrix:
    """Layout of the exchanged message, one row a rank.

    Behind the status words (:mod:`ep_comm.status`) stand the tokens for each rank and the pairs for each
    expert; where a transport knows of hosts, the tokens for each host; then zeros up to a multiple of
    ``WIDTH_UNIT`` words. So dispatchers of different shapes send messages of one length: where ranks are out of step,
    they can still read so in each other's status words, which collectives of different sizes would not let them.
    The length follows from the shape alone, as captured graphs keep the one that they were made with.
    """

    WIDTH_UNIT = 512  # 2 KB: what a collective takes for so little is its latency

    def __init__(self, config: EPConfig, ep_size: int, hosts: Hosts | None = None) -> None:
        self.num_experts = config.num_experts
        self.ep_size = ep_size
        self._hosts = hosts
        self._counts_end = HEADER_WORDS + ep_size + config.num_experts
        self._used = self._counts_end + (0 if hosts is None else hosts.num_hosts)
        # One rank sends nothing, and reads its own message only.
        self.width = self._used if ep_size == 1 else round_up(self._used, self.WIDTH_UNIT)

    def header(self, operation: int, agreed: int, num_tokens: int, dtype_code: int, budget_rows: int) -> Header:
        """The status words before the fault; see :mod:`ep_comm.status`."""
        return Header(operation, agreed % 2**31, num_tokens, dtype_code, budget_rows)

    def message(
        self,
        header: Header,
        fault: Tensor | Sequence[int],
        routing: LocalRouting | None = None,
        device: torch.device | None = None,
    ) -> Tensor:
        """This rank's row, int32 ``[width]``.

        Args:
            header: from :meth:`header`.
            fault: code and four integers, zeros where nothing is wrong; int32 ``[5]`` if it is on the device.
            routing: counts to send; None sends zeros (a message that only carries status).
            device: of the message; without it that of ``routing``.
        """
        counts: list[Tensor] = []
        if routing is not None:
            device = routing.counts_E.device
            counts = [routing.pair_tokens_P, routing.counts_E, *self._host_counts(routing)]
        kernels = cuda_kernels(device)
        if kernels is not None:
            return write_message(kernels, header.words, fault, counts, self.width)
        if not isinstance(fault, Tensor):
            fault = torch.tensor(fault, dtype=torch.int32).to(device)
        sent = [torch.cat(counts).int()] if counts else []
        empty = self.width - (self._used if counts else HEADER_WORDS)
        return torch.cat([header.on(device), fault, *sent, torch.zeros(empty, dtype=torch.int32, device=device)])

    def split(self, matrix_PX: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The exchanged matrix as (status words ``[P, HEADER_WORDS]``, pair tokens ``[P, P]``, counts ``[P, E]``)."""
        sizes = [HEADER_WORDS, self.ep_size, self.num_experts]
        header, pairs, counts = matrix_PX[:, : self._counts_end].split(sizes, dim=1)
        return header, pairs, counts

    def host_tokens(self, matrix_PX: Tensor) -> Tensor:
        """The tokens from every rank to every host, ``[P, G]``; ``[P, 0]`` where the transport knows of no hosts."""
        return matrix_PX[:, self._counts_end : self._used]

    def pair_tokens(self, matrix_PX: Tensor) -> Tensor:
        """The tokens from every rank to every rank, a view ``[P, P]`` of the exchanged matrix."""
        return matrix_PX.narrow(1, HEADER_WORDS, self.ep_size)

    def rows_of(self, host_PX: Tensor, rank: int, alignment: int) -> int:
        """What :func:`required_rows` says of one rank, from the exchanged matrix on the host."""
        local = self.num_experts // self.ep_size
        first = HEADER_WORDS + self.ep_size + rank * local
        # By NumPy, as its calls cost a fraction of torch's and an eager dispatch waits for this number.
        counts_L = host_PX.numpy()[:, first : first + local].sum(0, dtype="int64")
        return int((-(-counts_L // alignment)).sum()) * alignment

    def _host_counts(self, routing: LocalRouting) -> list[Tensor]:
        return [] if self._hosts is None else [self._hosts.needed(routing.needs_TP).sum(0)]


@dataclass(frozen=True)
class Sizing:
    """How large this dispatch's buffers are: host integers, decided before the payload moves.

    Attributes:
        rows: R of this rank.
        pair_tokens: tokens between ranks (outer index: source, inner: destination) where every pair moves
            exactly what it needs; None where every pair moves the fixed ``pair_rows``.
        pair_rows: token rows between two ranks, for transports that move a fixed number.
        host_tokens: tokens from every rank to every host, with ``pair_tokens``, for transports that know of hosts.
    """

    rows: int
    pair_rows: int | None = None
    pair_tokens: list[list[int]] | None = None
    host_tokens: list[list[int]] | None = None


@dataclass(frozen=True, kw_only=True)
class RoutingPlan:
    """Everything all ranks agree on about one dispatch. All tensors are on the device.

    A transport may plan in its own way and add its own fields, but these mean the same everywhere.
    """

    rank: int
    ep_size: int
    num_tokens: int
    top_k: int
    matrix_PX: Tensor
    """int32: the exchanged messages, see :class:`CountMatrix`."""
    slot_rank_TK: Tensor
    """integer: rank that owns the slot's expert; -1 where the slot has no row."""
    slot_rows_TK: Tensor
    """integer: row on that rank; -1 where there is no expert or the row is beyond the rank's budget."""
    pair_tokens_PP: Tensor
    """integer: tokens from rank (first index) to rank (second index)."""
    tokens_per_expert_L: Tensor
    """int64: rows of each expert of this rank that fit its budget, without padding."""
    expert_offsets_L1: Tensor
    """int64: segment starts and the last segment's end, capped by the budget."""
    required_rows_P: Tensor
    """int64: rows every rank needs, whether they fit or not."""
    overflow: Tensor
    """zero-dimensional, not zero if some rank's rows or some pair's tokens do not fit. Equal on all ranks."""


@dataclass(frozen=True, kw_only=True)
class CountedPlan(RoutingPlan):
    """A plan derived by :func:`make_plan`."""

    needs_TP: Tensor
    """bool: token t goes to rank p."""


def make_plan(
    routing: LocalRouting,
    matrix_PX: Tensor,
    layout: CountMatrix,
    *,
    rank: int,
    alignment: int,
    pair_limit: int | None,
) -> CountedPlan:
    """Derive the plan from this rank's routing and the counts of all ranks; no host sync.

    Args:
        matrix_PX: exchanged messages, int32 ``[P, layout.width]``; the ranks' budgets are in their status words.
        pair_limit: most tokens that may go from one rank to another, or None.
    """
    pairs_PP = layout.pair_tokens(matrix_PX)
    ep_size, num_experts = layout.ep_size, layout.num_experts
    num_tokens, top_k = routing.idx_TK.shape
    common = {
        "rank": rank,
        "ep_size": ep_size,
        "num_tokens": num_tokens,
        "top_k": top_k,
        "matrix_PX": matrix_PX,
        "pair_tokens_PP": pairs_PP,
        "needs_TP": routing.needs_TP,
    }
    kernels = cuda_kernels(matrix_PX.device)
    if kernels is not None and routing_fits(kernels, num_experts):
        derived = derive_plan(
            kernels,
            matrix_PX,
            routing.idx_TK,
            routing.position_TK,
            num_experts=num_experts,
            rank=rank,
            alignment=alignment,
            pair_limit=pair_limit,
        )
        return CountedPlan(**common, **derived)
    header_PX, _, counts_PE = layout.split(matrix_PX)
    counts_PE = counts_PE.long()
    experts_per_rank = num_experts // ep_size

    offsets_PL1 = segment_offsets(counts_PE.sum(0).view(ep_size, experts_per_rank), alignment)
    required_P = offsets_PL1[:, -1].contiguous()
    budget_P = header_PX[:, Word.BUDGET_ROWS].long()
    overflow = (required_P > budget_P).any()
    if pair_limit is not None:
        overflow = overflow | (pairs_PP > pair_limit).any()

    from_lower_E = counts_PE[:rank].sum(0)
    base_E = offsets_PL1[:, :-1].reshape(num_experts) + from_lower_E
    idx_TK = routing.idx_TK.clamp_min(0)
    rank_TK = idx_TK // experts_per_rank
    row_TK = base_E[idx_TK] + routing.position_TK
    fits_TK = (routing.idx_TK >= 0) & (row_TK < budget_P[rank_TK])

    offsets_L1 = torch.minimum(offsets_PL1[rank], budget_P[rank])
    counts_L = counts_PE.sum(0)[rank * experts_per_rank : (rank + 1) * experts_per_rank]
    return CountedPlan(
        **common,
        slot_rank_TK=torch.where(fits_TK, rank_TK, -1),
        slot_rows_TK=torch.where(fits_TK, row_TK, -1),
        tokens_per_expert_L=torch.minimum(counts_L, budget_P[rank] - offsets_L1[:-1]),
        expert_offsets_L1=offsets_L1,
        required_rows_P=required_P,
        overflow=overflow,
    )
