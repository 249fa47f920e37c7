"""The operations on rows that need no other rank: the codec, copies and sums by a table, gradients of weights.

Nothing here waits for the GPU, so everything may be captured in a CUDA graph. Letters as in docs/architecture.md.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..mxfp8 import MXFP8Tensor
from .kernels import DTYPE_CODE, CudaKernels, vector_bytes
from .sources import SCALE_FLOOR

__all__ = [
    "codec_fits",
    "dequantize_rows",
    "pick_from_rows",
    "place_in_rows",
    "quantize_rows",
    "sum_rows",
    "take_rows",
    "weighted_backward",
]

_ROW_WARPS = 8


def codec_fits(x_NH: Tensor, q: MXFP8Tensor) -> bool:
    """Whether :func:`quantize_rows` and :func:`dequantize_rows` take tensors of this layout: elements of a row
    adjacent, rows of ``x`` at multiples of 16 bytes, those of the elements at multiples of 8."""
    if x_NH.stride(1) != 1 or q.data.stride(1) != 1 or (q.scales.shape[1] > 1 and q.scales.stride(1) != 1):
        return False
    item = x_NH.element_size()
    return not ((x_NH.data_ptr() | x_NH.stride(0) * item) % 16 or (q.data.data_ptr() | q.data.stride(0)) % 8)


def quantize_rows(kernels: CudaKernels, x_NH: Tensor, rounding: str, out: MXFP8Tensor) -> None:
    """The bytes of :func:`ep_comm.quantize_mxfp8` for ``x [N, H]``, into ``out``; see :func:`codec_fits`."""
    count, hidden = x_NH.shape
    defines = {"DTYPE": DTYPE_CODE[x_NH.dtype], "SCALE_FLOOR": SCALE_FLOOR[rounding], "WARPS": _ROW_WARPS}
    kernels.launch(
        "row_ops.cu", "quantize_rows", defines, _row_blocks(kernels, count), _ROW_WARPS * 32,
        (*_with_stride(x_NH), *_with_stride(out.data), *_with_stride(out.scales), np.int64(count), hidden),
    )  # fmt: skip


def dequantize_rows(kernels: CudaKernels, q: MXFP8Tensor, out_NH: Tensor) -> None:
    """The values of :func:`ep_comm.dequantize_mxfp8` for rows ``[N, H]``, into ``out``; see :func:`codec_fits`."""
    count, hidden = out_NH.shape
    kernels.launch(
        "row_ops.cu", "dequantize_rows", {"DTYPE": DTYPE_CODE[out_NH.dtype], "WARPS": _ROW_WARPS},
        _row_blocks(kernels, count), _ROW_WARPS * 32,
        (*_with_stride(q.data), *_with_stride(q.scales), *_with_stride(out_NH), np.int64(count), hidden),
    )  # fmt: skip


def weighted_backward(
    kernels: CudaKernels,
    y_RH: Tensor,
    grad_RH: Tensor,
    weights_R: Tensor,
    row_count: Tensor,
    *,
    zero_tail: bool = True,
    num_sms: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Backward of scaling rows by weights: ``round(weights * grad)`` and ``row_dot(y, grad)``.

    Args:
        row_count: int64, one element on the device: rows in use; the gradient of later ones is zero.

    Returns:
        ``[R, H]`` in the dtype of ``grad_RH``, and float32 ``[R]``: bits of :func:`ep_comm.rows.scale_rows`
        and :func:`ep_comm.rows.row_dot`.
    """
    count, hidden = y_RH.shape
    grad_rows = torch.empty_like(grad_RH)
    grad_weights = torch.empty(count, dtype=torch.float32, device=y_RH.device)
    levels = max(0, (hidden - 1).bit_length() - 8)
    defines = {"DTYPE": DTYPE_CODE[y_RH.dtype], "WARPS": _ROW_WARPS, "TREE_LEVELS": levels}
    kernels.launch(
        "row_ops.cu", "weighted_backward", defines, _row_blocks(kernels, count, num_sms), _ROW_WARPS * 32,
        (y_RH, grad_RH, weights_R, grad_rows, grad_weights, np.int64(count), hidden, row_count,
         int(zero_tail)),
    )  # fmt: skip
    return grad_rows, grad_weights


def take_rows(kernels: CudaKernels, rows_NX: Tensor, index_R: Tensor, out_RX: Tensor) -> bool:
    """``out[r] = rows[index[r]]``; int64 ``index`` within the rows.

    Returns:
        False, with nothing done, where the layout does not fit: elements of a row have to be adjacent, and rows and
        their distances an even number of bytes.
    """
    count, width = out_RX.shape
    if width > 1 and (rows_NX.stride(1) != 1 or out_RX.stride(1) != 1):
        return False
    item = out_RX.element_size()
    vector = _common_vector(rows_NX, out_RX)
    if vector < 2:
        return False
    if count * width == 0:
        return True
    segments = _segments(kernels, count, -(-width * item // (vector * 128)))
    kernels.launch(
        "table_ops.cu", "take_rows", {"VEC_BYTES": vector, "DTYPE": 1, "WARPS": _ROW_WARPS},
        _row_blocks(kernels, count * segments), _ROW_WARPS * 32,
        (rows_NX, np.int64(rows_NX.stride(0) * item), index_R, out_RX, np.int64(out_RX.stride(0) * item),
         np.int64(count), np.int64(width * item), segments),
    )  # fmt: skip
    return True


def sum_rows(kernels: CudaKernels, rows_RH: Tensor, table_NK: Tensor, weights_R: Tensor | None, out_NH: Tensor) -> None:
    """The sums of :func:`ep_comm.rows.sum_rows` by a contiguous int64 table; ``out`` float32, bfloat16 or float16."""
    count, hidden = out_NH.shape
    defines = {
        "DTYPE": DTYPE_CODE[rows_RH.dtype],
        "OUT_DTYPE": DTYPE_CODE[out_NH.dtype],
        "WARPS": _ROW_WARPS,
    }
    segments = _segments(kernels, count, -(-hidden // 256))
    kernels.launch(
        "table_ops.cu", "sum_rows", defines, _row_blocks(kernels, count * segments), _ROW_WARPS * 32,
        (*_with_stride(rows_RH), table_NK, table_NK.shape[1], weights_R, *_with_stride(out_NH), np.int64(count), hidden,
         segments),
    )  # fmt: skip


def place_in_rows(kernels: CudaKernels, values_NK: Tensor | None, table_NK: Tensor, out_R: Tensor) -> None:
    """``out[table[n, k]] = values[n, k]`` where the table, int64 and contiguous, is not negative.

    Args:
        values_NK: of the dtype of ``out``, 4 or 8 bytes wide, any strides; None for the number of the item (int64).
    """
    strides = (0, 0) if values_NK is None else values_NK.stride()
    count, top_k = table_NK.shape
    kernels.launch(
        "table_ops.cu", "place_in_rows", {"DTYPE": 1, "WARPS": _ROW_WARPS},
        _row_blocks(kernels, -(-count * top_k // 32)), _ROW_WARPS * 32,
        (values_NK, *map(np.int64, strides), table_NK, np.int64(count), top_k, out_R,
         np.int64(out_R.shape[0]), out_R.element_size()),
    )  # fmt: skip


def pick_from_rows(kernels: CudaKernels, values_R: Tensor, table_NK: Tensor, out_NK: Tensor) -> None:
    """The values of :func:`ep_comm.rows.pick_from_rows`."""
    count, top_k = table_NK.shape
    kernels.launch(
        "table_ops.cu", "pick_from_rows", {"DTYPE": 1, "WARPS": _ROW_WARPS},
        _row_blocks(kernels, -(-count * top_k // 32)), _ROW_WARPS * 32,
        (values_R, np.int64(values_R.shape[0]), table_NK, np.int64(count), top_k, *_with_stride(out_NK)),
    )  # fmt: skip


def _common_vector(*tensors: Tensor) -> int:
    """The widest access that fits the rows of all tensors and their strides."""
    rows = 0
    for tensor in tensors:
        item = tensor.element_size()
        rows |= tensor.shape[1] * item | tensor.stride(0) * item
    return vector_bytes(rows, *tensors)


def _segments(kernels: CudaKernels, rows: int, most: int) -> int:
    """In how many pieces a row is cut, so that few rows fill the chip too."""
    return max(1, min(most, kernels.num_sms * _ROW_WARPS * 8 // max(1, rows)))


def _with_stride(rows: Tensor) -> tuple[Tensor, np.int64]:
    return rows, np.int64(rows.stride(0))


def _row_blocks(kernels: CudaKernels, rows: int, num_sms: int | None = None) -> int:
    most = min(num_sms or kernels.num_sms, kernels.num_sms) * 8
    return max(1, min(most, -(-rows // _ROW_WARPS)))
