"""What happens to rows on one rank: copies to expert rows, and sums back, in a fixed order.

The torch implementations below run on any device and are the reference for the CUDA kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from . import devices
from .cuda.kernels import cuda_kernels

__all__ = [
    "SumTable",
    "count_along",
    "invert_table",
    "row_dot",
    "scale_rows",
    "sum_rows",
    "take_rows",
    "weighted_backward",
]

# Scratch of one chunk stays in a core's cache; on CPUs fresh memory costs more than the arithmetic.
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class SumTable:
    """A ``[N, K]`` table of row numbers (-1 = none), ready for :func:`sum_rows`.

    The CUDA kernel walks the table itself. Elsewhere it is flattened: ``entries`` holds the row numbers that are
    present, item by item and slot by slot; the entries of item ``n`` are ``entries[starts[n] : starts[n + 1]]``. On
    devices where a shape must not depend on data the list is padded at its end, and ``starts`` has one more
    element, so that the padding forms an item of its own.
    """

    table_NK: Tensor
    entries: Tensor | None = None
    starts: Tensor | None = None

    @property
    def num_items(self) -> int:
        """N."""
        return self.table_NK.shape[0]

    @classmethod
    def build(cls, table_NK: Tensor, max_entries: int) -> SumTable:
        """From ``table_NK`` (int64). ``max_entries`` bounds how many entries are present."""
        table_NK = table_NK.contiguous()
        if cuda_kernels(table_NK.device) is not None:
            return cls(table_NK)
        present_NK = table_NK >= 0
        counts_N = present_NK.sum(1)
        starts = torch.nn.functional.pad(counts_N.cumsum(0), (1, 0))
        flat_S, present_S = table_NK.flatten(), present_NK.flatten()
        if devices.host_reads_are_free(table_NK.device):
            return cls(table_NK, flat_S[present_S], starts)
        size = min(max_entries, table_NK.numel())
        place_S = torch.where(present_S, present_S.cumsum(0) - 1, size).clamp_max(size)
        entries = torch.zeros(size + 1, dtype=torch.int64, device=table_NK.device)
        entries.scatter_(0, place_S, flat_S)
        end = torch.full_like(starts[:1], size)
        return cls(table_NK, entries[:size], torch.cat([starts, end]))


def count_along(needs_TD: Tensor) -> Tensor:
    """int64 ``[T, D]``: how many of the items up to and including this one go to the destination."""
    # Along adjacent elements: a GPU sums along the outer dimension one item after the other.
    return needs_TD.t().contiguous().long().cumsum(1).t()


def sum_rows(rows_RH: Tensor, table: SumTable, weights_R: Tensor | None, out_NH: Tensor) -> None:
    """``out[n] = round(sum over the entries r of item n, in order, of (weights[r] *) rows[r])``.

    Products and sums are FP32, each product is rounded before it is added, sums start at +0, and items
    without entries get zero. ``round`` is to the dtype of ``out_NH``.

    Args:
        rows_RH: bf16, fp16 or fp32 ``[R, H]``; rows may be strided, elements contiguous.
        weights_R: fp32 ``[R]`` or None.
        out_NH: ``[N, H]``, overwritten.
    """
    kernels = cuda_kernels(rows_RH.device)
    if kernels is not None:
        from .cuda import row_ops

        if table.num_items:
            row_ops.sum_rows(kernels, rows_RH, table.table_NK, weights_R, out_NH)
        return
    if not devices.host_reads_are_free(rows_RH.device):
        _sum_chunk(rows_RH, table.entries, table.starts, weights_R, out_NH, table.num_items)
        return
    if table.num_items == 0:
        return
    width = max(1, rows_RH.shape[1])
    average = max(1, table.entries.numel() // table.num_items)
    step = max(1, _CHUNK_BYTES // (4 * width * average))
    bounds = [*range(0, table.num_items, step), table.num_items]
    edges = table.starts[bounds].tolist()
    for first, last, lo, hi in zip(bounds[:-1], bounds[1:], edges[:-1], edges[1:], strict=True):
        starts = table.starts[first : last + 1] - lo
        _sum_chunk(rows_RH, table.entries[lo:hi], starts, weights_R, out_NH[first:last], last - first)


def _sum_chunk(
    rows_RH: Tensor, entries: Tensor, starts: Tensor, weights_R: Tensor | None, out_NH: Tensor, num_items: int
) -> None:
    if entries.numel() == 0:
        out_NH.zero_()
        return
    picked_MH = rows_RH.index_select(0, entries).float()
    if weights_R is not None:
        picked_MH.mul_(weights_R.index_select(0, entries).unsqueeze(1))
    # Bags of consecutive rows: embedding_bag adds the FP32 rows of a bag one after the other.
    order_M = torch.arange(entries.numel(), device=entries.device)
    out_NH.copy_(embedding_bag(order_M, picked_MH, starts, mode="sum", include_last_offset=True)[:num_items])


def take_rows(rows_NX: Tensor, index_R: Tensor, out_RX: Tensor | None = None) -> Tensor:
    """``out[r] = rows[index[r]]``.

    Args:
        rows_NX: ``[N, X]`` of any dtype.
        index_R: int64 ``[R]`` from 0 to N - 1.
        out_RX: ``[R, X]`` of the same dtype, overwritten; new without it.
    """
    if out_RX is None:
        out_RX = rows_NX.new_empty(index_R.shape[0], rows_NX.shape[1])
    kernels = cuda_kernels(rows_NX.device)
    if kernels is not None:
        from .cuda import row_ops

        if row_ops.take_rows(kernels, rows_NX, index_R, out_RX):
            return out_RX
    if rows_NX.dtype == torch.float8_e4m3fn:  # index_select has no kernel for it; bytes are bytes
        torch.index_select(rows_NX.view(torch.uint8), 0, index_R, out=out_RX.view(torch.uint8))
        return out_RX
    return torch.index_select(rows_NX, 0, index_R, out=out_RX)


def invert_table(table_NK: Tensor, num_rows: int, missing: int) -> Tensor:
    """For every row the item that has it in ``table_NK`` (int64, -1 = none), else ``missing``; int64 ``[R]``."""
    return _place(None, table_NK, num_rows, missing)


def place_in_rows(values_NK: Tensor, table_NK: Tensor, num_rows: int, missing: float) -> Tensor:
    """``out[table[n, k]] = values[n, k]``, and ``missing`` in rows that no slot names; ``[num_rows]``."""
    return _place(values_NK, table_NK, num_rows, missing)


def _place(values_NK: Tensor | None, table_NK: Tensor, num_rows: int, missing: float) -> Tensor:
    """Values, or without them the number of the item."""
    dtype, device = torch.int64 if values_NK is None else values_NK.dtype, table_NK.device
    kernels = cuda_kernels(device)
    if kernels is not None and dtype.itemsize in (4, 8):
        from .cuda import row_ops

        out_R = torch.full((num_rows,), missing, dtype=dtype, device=device)
        row_ops.place_in_rows(kernels, values_NK, table_NK.contiguous(), out_R)
        return out_R
    if values_NK is None:
        values_NK = torch.arange(table_NK.shape[0], device=device).unsqueeze(1).expand(table_NK.shape)
    # Absent slots write to a row behind the last one: no boolean mask, so no data-dependent shape.
    target_S = torch.where(table_NK >= 0, table_NK, num_rows).flatten()
    out = torch.full((num_rows + 1,), missing, dtype=dtype, device=device)
    return out.scatter_(0, target_S, values_NK.flatten())[:num_rows]


def pick_from_rows(values_R: Tensor, table_NK: Tensor, out_NK: Tensor | None = None) -> Tensor:
    """``out[n, k] = values[table[n, k]]``, zero where the slot is absent.

    Args:
        values_R: fp32, contiguous.
        table_NK: int64, contiguous, from -1 to R - 1.
        out_NK: fp32, rows at any distance, overwritten; new without it.
    """
    if out_NK is None:
        out_NK = values_R.new_empty(table_NK.shape)
    kernels = cuda_kernels(values_R.device)
    if kernels is not None:
        from .cuda import row_ops

        row_ops.pick_from_rows(kernels, values_R, table_NK, out_NK)
        return out_NK
    if values_R.numel() == 0:
        return out_NK.zero_()
    picked_NK = values_R.index_select(0, table_NK.clamp_min(0).flatten()).view(table_NK.shape)
    return out_NK.copy_(torch.where(table_NK >= 0, picked_NK, 0))


def scale_rows(rows_RH: Tensor, weights_R: Tensor) -> Tensor:
    """``round(weights[r] * rows[r])`` in FP32, rounded to the dtype of the rows."""
    return (rows_RH.float() * weights_R.unsqueeze(1)).to(rows_RH.dtype)


def row_dot(a_RH: Tensor, b_RH: Tensor) -> Tensor:
    """FP32 ``[R]``: dot product of each pair of rows, summed in a fixed order by halving.

    The row is padded with zeros to a power of two; then its upper half is added to its lower half until
    one element is left. Products are rounded before they are added. The order does not depend on the
    device, the number of threads or the other rows.
    """
    products_RX = a_RH.float() * b_RH.float()
    width = products_RX.shape[1]
    half = 1 << max(0, (width - 1).bit_length() - 1)
    while width > 1:
        low, high = products_RX[:, :half], products_RX[:, half:width]
        low[:, : width - half] += high
        products_RX, width, half = low, half, half // 2
    return products_RX[:, 0].contiguous()


def weighted_backward(
    output_RH: Tensor, grad_RH: Tensor, weights_R: Tensor, row_count: Tensor
) -> tuple[Tensor, Tensor]:
    """Backward of scaling rows by weights.

    Args:
        output_RH, grad_RH: the rows that were scaled, and the gradient of the scaled rows.
        weights_R: fp32.
        row_count: int64 ``[1]`` on the device: rows in use; nobody reads the gradients of later ones.

    Returns:
        ``scale_rows(grad, weights)`` and ``row_dot(output, grad)``.
    """
    kernels = cuda_kernels(output_RH.device)
    if kernels is not None and output_RH.dtype == grad_RH.dtype:
        from .cuda import row_ops

        return row_ops.weighted_backward(kernels, output_RH, grad_RH, weights_R, row_count)
    return scale_rows(grad_RH, weights_R), row_dot(output_RH, grad_RH)
