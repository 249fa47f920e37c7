"""The tables of :mod:`ep_comm.transport.hop` by kernels, each with the arguments of the torch version there.

Nothing here waits for the GPU, so everything may be captured in a CUDA graph. Letters as in docs/architecture.md.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .kernels import CudaKernels

__all__ = ["place_items", "receive_rows", "slot_scalars", "write_slots"]

_THREADS = 1024
_BLOCK_ITEMS = 8 * _THREADS  # of place_items


def place_items(
    kernels: CudaKernels, needs_TD: Tensor, counts_D: Tensor | None, rows: int, num_sent: int
) -> tuple[Tensor, Tensor]:
    """See :func:`ep_comm.transport.hop.place_items`."""
    num_items, places = needs_TD.shape
    if needs_TD.stride(1) != 1:
        needs_TD = needs_TD.contiguous()
    if counts_D is not None:
        counts_D = counts_D.contiguous()
    position_TD = torch.empty(num_items, places, dtype=torch.int64, device=needs_TD.device)
    tokens_S = torch.empty(num_sent, dtype=torch.int64, device=needs_TD.device)
    kernels.launch(
        "hop.cu", "place_items", {}, places * max(1, -(-num_items // _BLOCK_ITEMS)), _THREADS,
        (needs_TD, np.int64(needs_TD.stride(0)), np.int64(num_items), places, counts_D,
         8 if counts_D is None else counts_D.element_size(), np.int64(rows), position_TD, tokens_S, np.int64(num_sent)),
    )  # fmt: skip
    return position_TD, tokens_S


def write_slots(
    kernels: CudaKernels,
    tokens_S: Tensor,
    position_TD: Tensor,
    slot_places_TK: Tensor,
    values_TK: Tensor,
    out_SK: Tensor,
    scalars_TK: Tensor | None = None,
    out_scalars_SK: Tensor | None = None,
) -> None:
    """See :meth:`ep_comm.transport.hop.Hop.write_slots`; the rows of both results are as far apart."""
    (num_items, places), (num_sent, top_k) = position_TD.shape, out_SK.shape
    kernels.launch(
        "hop.cu", "write_slots", {}, _blocks(kernels, num_sent * top_k), _THREADS,
        (tokens_S, position_TD, slot_places_TK.contiguous(), values_TK.contiguous(), scalars_TK, np.int64(num_sent),
         np.int64(num_items), places, top_k, out_SK, out_SK.element_size(), out_scalars_SK,
         np.int64(out_SK.stride(0) * out_SK.element_size())),
    )  # fmt: skip


def slot_scalars(
    kernels: CudaKernels, returned_SK: Tensor, position_TD: Tensor, slot_places_TK: Tensor, slot_rows_TK: Tensor
) -> Tensor:
    """See :meth:`ep_comm.transport.hop.Hop.slot_scalars`."""
    num_items, top_k = slot_places_TK.shape
    out_TK = torch.empty(num_items, top_k, dtype=torch.float32, device=returned_SK.device)
    kernels.launch(
        "hop.cu", "slot_scalars", {}, _blocks(kernels, num_items * top_k), _THREADS,
        (returned_SK, np.int64(returned_SK.stride(0)), np.int64(returned_SK.shape[0]), position_TD,
         slot_places_TK.contiguous(), slot_rows_TK.contiguous(), np.int64(num_items), position_TD.shape[1], top_k,
         out_TK),
    )  # fmt: skip
    return out_TK


def receive_rows(
    kernels: CudaKernels, wire_NK: Tensor, num_rows: int, scalars_NK: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """See :func:`ep_comm.transport.hop.receive_rows`; ``wire_NK`` int32."""
    (count, top_k), device = wire_NK.shape, wire_NK.device
    rows_NK = torch.empty(count, top_k, dtype=torch.int64, device=device)
    source_R = torch.empty(num_rows, dtype=torch.int64, device=device)
    scalars_R = None if scalars_NK is None else torch.empty(num_rows, dtype=torch.float32, device=device)
    kernels.launch(
        "hop.cu", "clear_rows", {}, _blocks(kernels, num_rows), _THREADS,
        (source_R, np.int64(count), scalars_R, np.int64(num_rows)),
    )  # fmt: skip
    kernels.launch(
        "hop.cu", "enter_rows", {}, _blocks(kernels, count * top_k), _THREADS,
        (wire_NK, np.int64(wire_NK.stride(0)), scalars_NK, np.int64(0 if scalars_NK is None else scalars_NK.stride(0)),
         np.int64(count), top_k, np.int64(num_rows), rows_NK, source_R, scalars_R),
    )  # fmt: skip
    return rows_NK, source_R, scalars_R


def _blocks(kernels: CudaKernels, threads: int) -> int:
    return max(1, min(kernels.num_sms * 2, -(-threads // _THREADS)))
