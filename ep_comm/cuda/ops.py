"""The operations of the symmetric transport on one rank: allocate results, choose variants, launch.

Every rank of a window calls the same operations in the same order, on one stream at a time: they meet in
the window. Nothing here waits for the GPU, so everything may be captured in a CUDA graph.

Letters as in docs/architecture.md; ``X = HEADER_WORDS + P + E`` is a message of routing counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import ArgumentError
from ..mxfp8 import MXFP8Tensor
from ..status import HEADER_WORDS
from .kernels import DTYPE_CODE, CudaKernels, vector_bytes
from .sources import SCALE_FLOOR
from .tuning import GatherTuning, RingShape, ScatterTuning, default_gather_tuning, default_scatter_tuning
from .window import PlanLaunch, WindowLayout

__all__ = [
    "GatherTuning",
    "PlanTables",
    "RingShape",
    "ScatterTuning",
    "Window",
    "barrier",
    "gather_sum",
    "plan",
    "scatter_rows",
]


@dataclass
class Window:
    """One rank's view of the symmetric windows of its group.

    Attributes:
        peers: int64 ``[P]`` on the device, address of every rank's window as this rank sees it.
        local: uint8, this rank's own window, zeroed before its first use.
        state: int32 ``[8]`` on the device, zero at first: epoch and error words.
        first_bad: int32 ``[1]`` on the device, 2**31 - 1 at first.
        rank: this rank.
        layout: where things are in a window; equal on all ranks.
        timeout_ns: how long a kernel waits for a peer before it records an error in ``state`` and gives up.
    """

    peers: Tensor
    local: Tensor
    state: Tensor
    first_bad: Tensor
    rank: int
    layout: WindowLayout
    timeout_ns: int

    def _common(self) -> tuple[object, ...]:
        return self.peers, self.state, np.int64(self.timeout_ns), self.rank, self.layout.ep_size

    def received_rows(self, top_k: int, max_tokens: int) -> Tensor:
        """int32 ``[P, max_tokens, K]`` view: rows that the latest plan put on this rank, -1 = none."""
        return self._table(self.layout.rows_offset, torch.int32, top_k, max_tokens)

    def received_weights(self, top_k: int, max_tokens: int) -> Tensor:
        """float32 ``[P, max_tokens, K]`` view: the weights of those rows."""
        return self._table(self.layout.weights_offset, torch.float32, top_k, max_tokens)

    def _table(self, offset: int, dtype: torch.dtype, top_k: int, max_tokens: int) -> Tensor:
        shape = (self.layout.ep_size, max_tokens, top_k)
        count = shape[0] * shape[1] * shape[2]
        return self.local[offset : offset + count * 4].view(dtype).view(shape)


class PlanTables(NamedTuple):
    """What :func:`plan` derives, all on the device."""

    matrix_PX: Tensor
    """int32 ``[P, X]``: the messages of all ranks."""
    tokens_per_expert_L: Tensor
    """int64: rows of each expert that fit the budget."""
    expert_offsets_L1: Tensor
    """int64 ``[L + 1]``, capped by the budget."""
    required_rows_P: Tensor
    """int64."""
    verdict: Tensor
    """int32 ``[4]``: overflow, some rank reports a fault, most tokens of a rank, rows this rank needs."""
    token_counts_P: Tensor
    """int32: tokens of each rank."""
    slot_rows_TK: Tensor
    """int32: row of each slot on its rank, or -1."""
    slot_ranks_TK: Tensor
    """int32: rank of each slot, or -1 where it goes nowhere."""


def plan(
    kernels: CudaKernels,
    window: Window,
    header: Tensor,
    topk_idx_TK: Tensor,
    topk_weights_TK: Tensor,
    *,
    num_experts: int,
    max_tokens: int,
    alignment: int,
    num_sms: int | None = None,
) -> PlanTables:
    """Count, exchange the counts, and derive where every slot lands; one kernel.

    Args:
        header: int32 ``[HEADER_WORDS]`` on the device: status words of this rank with token count and budget.
        topk_idx_TK: int32 or int64 ``[T, K]``, contiguous, -1 = none.
        topk_weights_TK: float32 ``[T, K]``, contiguous.
        max_tokens: most tokens of a rank (``T <= max_tokens``); equal on all ranks.
        num_sms: multiprocessors to spread over, if so many tokens leave a choice; None means all.
    """
    num_tokens, top_k = topk_idx_TK.shape
    layout, device = window.layout, topk_idx_TK.device
    ranks, local = layout.ep_size, num_experts // layout.ep_size

    def new(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    tables = PlanTables(
        matrix_PX=new(ranks, HEADER_WORDS + ranks + num_experts),
        tokens_per_expert_L=new(local, dtype=torch.int64),
        expert_offsets_L1=new(local + 1, dtype=torch.int64),
        required_rows_P=new(ranks, dtype=torch.int64),
        verdict=new(4),
        token_counts_P=new(ranks),
        slot_rows_TK=new(num_tokens, top_k),
        slot_ranks_TK=new(num_tokens, top_k),
    )
    shape = {"num_tokens": num_tokens, "top_k": top_k, "num_experts": num_experts, "ep_size": ranks}
    launch = PlanLaunch.of(_multiprocessors(kernels, num_sms), **shape)
    if launch.blocks > launch.resident_blocks(kernels.num_sms):  # more items a warp also take more shared memory
        launch = PlanLaunch.of(kernels.num_sms, **shape)
    if launch.blocks > launch.resident_blocks(kernels.num_sms):
        # Blocks would wait for others that never start. Transports ask plan_problem() when they are made.
        raise ArgumentError(
            f"rank {window.rank}: topk_idx has {num_tokens} x {top_k} slots, more than the plan kernel takes"
        )
    warps = PlanLaunch.WARPS
    defines = {"IDX64": int(topk_idx_TK.dtype == torch.int64), "WARPS": warps, "ITEMS_PER_WARP": launch.items_per_warp}
    kernels.launch(
        "plan.cu", "plan", defines, launch.blocks, warps * 32,
        (*window._common(), np.int64(layout.counts_offset), header, topk_idx_TK, topk_weights_TK,
         num_tokens, top_k, num_experts, layout.message_pitch, max_tokens, alignment,
         new(launch.blocks, ranks + num_experts),
         window.first_bad, np.int64(layout.rows_offset), np.int64(layout.weights_offset), *tables),
        shared_bytes=launch.shared_bytes,
    )  # fmt: skip
    return tables


def scatter_rows(
    kernels: CudaKernels,
    window: Window,
    rows_TH: Tensor,
    tables: PlanTables,
    num_rows: int,
    *,
    recv_rows_PTK: Tensor | None = None,
    max_tokens: int,
    alignment: int,
    mxfp8: bool = False,
    keep_mxfp8: bool = False,
    rounding: str = "rceil",
    zero_tail: bool = True,
    num_sms: int | None = None,
    tuning: ScatterTuning | None = None,
) -> tuple[Tensor | MXFP8Tensor, Tensor | None, Tensor]:
    """Copy every token row to all rows that the plan gives it; one kernel.

    Args:
        rows_TH: ``[T, H]``, contiguous.
        num_rows: R, at least what the plan's budget was (it bounds the rows that slots name).
        recv_rows_PTK: receiving table of the route. None on a route's first scatter, directly after its
            :func:`plan`: then the table and the rows' weights are taken from the window.

    Returns:
        rows ``[R, H]`` (:class:`MXFP8Tensor` with ``keep_mxfp8``), the rows' weights float32 ``[R]`` on the
        first scatter, else None, and the receiving table int32 ``[P, max_tokens, K]``.
    """
    num_tokens, hidden = rows_TH.shape
    top_k, layout, device = tables.slot_rows_TK.shape[1], window.layout, rows_TH.device
    first = recv_rows_PTK is None
    weights_R = torch.empty(num_rows, dtype=torch.float32, device=device) if first else None
    source = window.received_rows(top_k, max_tokens) if first else recv_rows_PTK
    source_weights = window.received_weights(top_k, max_tokens) if first else None
    kept = torch.empty_like(source) if first else None
    out_dtype = torch.float8_e4m3fn if keep_mxfp8 else rows_TH.dtype
    out = torch.empty(num_rows, hidden, dtype=out_dtype, device=device)
    scales = torch.empty(num_rows, hidden // 32, dtype=torch.uint8, device=device) if keep_mxfp8 else None

    if mxfp8 and rows_TH.data_ptr() % 16:
        rows_TH = rows_TH.clone()  # a view at an odd place; the codec reads 16 bytes at a time
    tuning = tuning or default_scatter_tuning(num_sms)
    defines = {
        "DTYPE": DTYPE_CODE[rows_TH.dtype],
        "VEC_BYTES": vector_bytes(hidden * rows_TH.element_size(), rows_TH, out),
        "WIRE": int(mxfp8),
        "OUT_MXFP8": int(keep_mxfp8),
        "SCALE_FLOOR": SCALE_FLOOR[rounding],
        "WARPS": tuning.warps,
        "BLOCKS_PER_SM": tuning.blocks_per_sm,
        "UNROLL": tuning.unroll,
        "UNIT": tuning.unit,
    }
    grid = _multiprocessors(kernels, num_sms) * tuning.blocks_per_sm
    kernels.launch(
        "scatter.cu", "scatter_rows", defines, grid, tuning.warps * 32,
        (*window._common(), max_tokens, top_k, hidden, np.int64(layout.area_offset),
         np.int64(layout.flags_offset), np.int64(layout.pitch), rows_TH, tables.slot_rows_TK,
         tables.slot_ranks_TK, source, source_weights, kept, weights_R, tables.token_counts_P,
         tables.tokens_per_expert_L, tables.expert_offsets_L1, tables.tokens_per_expert_L.numel(), alignment,
         np.int64(num_rows), int(zero_tail), out, scales, tuning.segments, tuning.lag),
    )  # fmt: skip
    rows = out if scales is None else MXFP8Tensor(out, scales)
    return rows, weights_R, kept if first else recv_rows_PTK


def gather_sum(
    kernels: CudaKernels,
    window: Window,
    rows_RH: Tensor,
    tables: PlanTables,
    recv_rows_PTK: Tensor,
    *,
    row_weights_R: Tensor | None = None,
    row_scalars_R: Tensor | None = None,
    max_tokens: int,
    num_sms: int | None = None,
    tuning: GatherTuning | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Sum the rows of every token, on the rank that has them and then over ranks ascending; one kernel.

    Args:
        rows_RH: ``[R, H]``, contiguous.
        recv_rows_PTK: from the first :func:`scatter_rows` of the route.
        row_weights_R: float32, factors of the rows, or None.
        row_scalars_R: float32, brought back unsummed to the slots, or None.

    Returns:
        sums ``[T, H]`` in the dtype of the rows, and the scalars float32 ``[T, K]`` (zero where a slot has no
        row) or None.
    """
    num_tokens, top_k = tables.slot_rows_TK.shape
    hidden, layout, device = rows_RH.shape[1], window.layout, rows_RH.device
    out = torch.empty(num_tokens, hidden, dtype=rows_RH.dtype, device=device)
    scalars = None
    if row_scalars_R is not None:
        scalars = torch.empty(num_tokens, top_k, dtype=torch.float32, device=device)
    row_bytes = hidden * rows_RH.element_size()
    tuning = tuning or default_gather_tuning(num_sms, max_tokens, row_bytes)
    vec = vector_bytes(row_bytes, rows_RH, out)
    defines = {
        "DTYPE": DTYPE_CODE[rows_RH.dtype],
        "VEC_BYTES": vec,
        "WEIGHTED": int(row_weights_R is not None),
        "UNIT": tuning.unit,
    }
    kernel = tuning.kernel if vec == 16 else "registers"
    shared, lag = 0, tuning.lag
    if kernel == "ring":
        file, name = "gather_ring.cu", "gather_sum_ring"
        ring = tuning.ring or RingShape.of(row_bytes)
        threads, shared = ring.threads, ring.shared_bytes
        defines |= ring.defines
    else:
        lag = lag if lag >= 0 else 2
        warps = tuning.warps
        if kernel == "bulk":
            file, name = "gather_bulk.cu", "gather_sum_bulk"
            warps = tuning.bulk_warps(top_k)
            shared = 2 * warps * top_k * tuning.chunk_bytes
            defines |= {"CHUNK_BYTES": tuning.chunk_bytes, "WARPS": warps}
        else:
            file, name = "gather.cu", "gather_sum"
            defines |= {"BATCH": tuning.batch, "WARPS": warps}
        threads = warps * 32
    kernels.launch(
        file, name, defines, _multiprocessors(kernels, num_sms), threads,
        (*window._common(), max_tokens, top_k, hidden, np.int64(layout.area_offset),
         np.int64(layout.flags_offset), np.int64(layout.scalars_offset), np.int64(layout.pitch), rows_RH,
         row_weights_R, row_scalars_R, recv_rows_PTK, tables.slot_rows_TK, tables.slot_ranks_TK,
         tables.token_counts_P, out, scalars, tuning.segments, lag),
        shared_bytes=shared,
    )  # fmt: skip
    return out, scalars


def barrier(kernels: CudaKernels, window: Window) -> None:
    """Everything that the ranks did in stream order before it is visible to all of them after it."""
    kernels.launch("barrier.cu", "barrier", {}, 1, 64, window._common())


def _multiprocessors(kernels: CudaKernels, num_sms: int | None) -> int:
    return kernels.num_sms if num_sms is None else min(num_sms, kernels.num_sms)
