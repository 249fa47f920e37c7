"""MXFP8: 8-bit floating-point elements with one power-of-two scale per 32 of them.

The format is that of the OCP Microscaling Formats (MX) specification v1.0: E4M3 elements (sign, 4 exponent
bits, 3 mantissa bits, bias 7, no infinity, NaN = 0x7F or 0xFF) and E8M0 scales (byte ``s`` means
``2**(s - 127)``, 0xFF means NaN), a block being 32 consecutive elements of a row. An element takes
8.25 bits instead of 16.

This is the plain torch implementation: it runs on any device and is the oracle for the CUDA kernel, which
has to produce the same bytes. Scales are found in integer arithmetic on the FP32 bit patterns and elements
are scaled by a power of two, which is exact, so the only rounding is that of the cast to E4M3. Nothing here
is differentiable, and nothing waits for a GPU.

With ``torch.set_flush_denormal(True)`` inputs below ``2**-126`` count as zero, and blocks with scale byte 0
decode to zero; everything else is unaffected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from . import devices
from .config import MXFP8_BLOCK, round_up
from .errors import ArgumentError
from .swizzle import swizzle_scales, unswizzle_scales

if TYPE_CHECKING:
    from .cuda.kernels import CudaKernels

__all__ = [
    "MXFP8Tensor",
    "dequantize_mxfp8",
    "dequantize_packed",
    "pack_mxfp8",
    "quantize_mxfp8",
    "scale_row_bytes",
    "swizzle_scales",
    "unpack_mxfp8",
    "unswizzle_scales",
    "wire_payload_bytes",
]

E4M3_MAX = 448.0
NAN_SCALE = 0xFF
NAN_ELEMENT = 0x7F
SCALE_ROW_ALIGNMENT = 16

_FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_FP32_INF_BITS = 0x7F800000
# What to take off the FP32 bits of amax so that their exponent field becomes the scale byte. Both divide by
# 2**8, the power of two in 448 = 1.75 * 2**8. "rceil" also adds 0x1FFFFF, which carries into the exponent
# exactly when the mantissa field is above 0x600000, the one of 1.75.
_SCALE_BIAS = {"rceil": (8 << 23) - 0x1FFFFF, "floor": 8 << 23}
# A chunk's FP32 scratch should stay in a core's second-level cache: on a CPU, fresh memory costs more
# (page faults) than the arithmetic.
_CPU_CHUNK_ELEMENTS = 1 << 18


class MXFP8Tensor(NamedTuple):
    """Rows of MXFP8: ``data`` float8_e4m3fn ``[..., H]`` and ``scales`` uint8 (E8M0) ``[..., H / 32]``."""

    data: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        """Shape of the elements, ``[..., H]``."""
        return self.data.shape

    @property
    def device(self) -> torch.device:
        """Device of both tensors."""
        return self.data.device

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Same as :func:`dequantize_mxfp8`."""
        return dequantize_mxfp8(self, dtype)

    def swizzled_scales(self, expert_offsets: Tensor | None = None) -> Tensor:
        """The scales of all rows in the layout that block-scaled GEMMs read, see :func:`swizzle_scales`."""
        return swizzle_scales(self.scales.reshape(-1, self.scales.shape[-1]), expert_offsets)


def scale_row_bytes(hidden_size: int) -> int:
    """Bytes that the scales of one row take on the wire: ``hidden_size / 32`` rounded up to 16."""
    return round_up(_blocks_per_row(hidden_size, "hidden_size"), SCALE_ROW_ALIGNMENT)


def wire_payload_bytes(hidden_size: int, itemsize: int, mxfp8: bool) -> int:
    """Bytes of one row on the wire: as MXFP8, or as it is with ``itemsize`` bytes an element."""
    return hidden_size + scale_row_bytes(hidden_size) if mxfp8 else hidden_size * itemsize


@torch.no_grad()
def quantize_mxfp8(x: Tensor, rounding: str = "rceil", out: MXFP8Tensor | None = None) -> MXFP8Tensor:
    """Quantise every 32 consecutive elements of each row of ``x``.

    With ``amax`` the largest magnitude of a block, its scale is

    - ``"rceil"``: ``amax / 448`` rounded up to a power of two, so that no element saturates;
    - ``"floor"``: ``2**(floor(log2(amax)) - 8)``, the text of the OCP specification (section 6.3); elements
      above 448 times the scale saturate,

    held to at least ``2**-127``. An element becomes ``x / scale``, computed exactly, rounded to nearest even
    in E4M3, saturated to +-448; its sign is kept even where it becomes zero. A block of zeros has scale
    byte 0. A block that holds a NaN or an infinity has scale byte 0xFF and all its elements are NaN (0x7F).

    Args:
        x: ``[..., H]`` float32, bfloat16 or float16, ``H`` a multiple of 32, any strides.
        rounding: ``"rceil"`` or ``"floor"``.
        out: where to write, with ``data`` of ``x``'s shape; any strides. New tensors without it.

    Returns:
        ``data`` float8_e4m3fn ``[..., H]`` and ``scales`` uint8 ``[..., H / 32]``.

    Raises:
        ArgumentError: (also a ``ValueError``) a wrong shape, dtype, device or rounding.
    """
    if x.dtype not in _FLOAT_DTYPES:
        raise ArgumentError(f"x must be float32, bfloat16 or float16, got {x.dtype}")
    if x.dim() == 0:
        raise ArgumentError("x must have at least one dimension, got a scalar")
    if rounding not in _SCALE_BIAS:
        raise ArgumentError(f"rounding must be one of {', '.join(map(repr, _SCALE_BIAS))}, got {rounding!r}")
    blocks = _blocks_per_row(x.shape[-1], "the last dimension of x")
    scales_shape = (*x.shape[:-1], blocks)
    if out is None:
        out = MXFP8Tensor(
            torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device),
            torch.empty(scales_shape, dtype=torch.uint8, device=x.device),
        )
    else:
        _check_like("out.data", out.data, x.shape, torch.float8_e4m3fn, x.device)
        _check_like("out.scales", out.scales, scales_shape, torch.uint8, x.device)
    if x.dim() == 2:
        _quantize_rows(x, rounding, out)
        return out
    rows_NH = x.reshape(-1, x.shape[-1])
    data_NH, scales_NS = _as_rows(out.data), _as_rows(out.scales)
    _quantize_rows(rows_NH, rounding, MXFP8Tensor(data_NH, scales_NS))
    # Strides that do not collapse to rows made a copy above: bring the result home.
    if data_NH.data_ptr() != out.data.data_ptr():
        out.data.copy_(data_NH.view(x.shape))
    if scales_NS.data_ptr() != out.scales.data_ptr():
        out.scales.copy_(scales_NS.view(scales_shape))
    return out


@torch.no_grad()
def dequantize_mxfp8(q: MXFP8Tensor, dtype: torch.dtype = torch.bfloat16, out: Tensor | None = None) -> Tensor:
    """Decode: element times scale, exact in FP32, then rounded once to ``dtype``.

    A NaN element and every element of a block with scale byte 0xFF give NaN. What is too large for
    ``dtype`` gives an infinity.

    Args:
        q: ``data`` float8_e4m3fn ``[..., H]``, ``scales`` uint8 ``[..., H / 32]``, any strides.
        dtype: float32, bfloat16 or float16.
        out: ``[..., H]`` of ``dtype``, where to write.

    Returns:
        ``[..., H]`` of ``dtype``.

    Raises:
        ArgumentError: (also a ``ValueError``) a wrong shape, dtype or device.
    """
    if dtype not in _FLOAT_DTYPES:
        got = dtype if isinstance(dtype, torch.dtype) else type(dtype).__name__
        raise ArgumentError(f"dtype must be float32, bfloat16 or float16, got {got}")
    data, scales = q
    if data.dtype != torch.float8_e4m3fn or data.dim() == 0:
        raise ArgumentError(
            f"q.data must be float8_e4m3fn with at least one dimension, got {data.dtype} {list(data.shape)}"
        )
    blocks = _blocks_per_row(data.shape[-1], "the last dimension of q.data")
    _check_like("q.scales", scales, (*data.shape[:-1], blocks), torch.uint8, data.device)
    if out is None:
        out = torch.empty(data.shape, dtype=dtype, device=data.device)
    else:
        _check_like("out", out, data.shape, dtype, data.device)
    rows = _as_rows(out)
    _dequantize_rows(_as_rows(data), _as_rows(scales), rows)
    if rows.data_ptr() != out.data_ptr():
        out.copy_(rows.view(data.shape))
    return out


def pack_mxfp8(x: Tensor, rounding: str, out_NW: Tensor, offset: int = 0) -> None:
    """Quantise the rows of ``x`` straight into wire rows.

    From byte ``offset`` on, a wire row holds the ``H`` element bytes, the ``H / 32`` scale bytes and zeros
    up to :func:`scale_row_bytes`. Its other bytes are left alone.

    Args:
        x: ``[N, H]`` float32, bfloat16 or float16.
        rounding: ``"rceil"`` or ``"floor"``, see :func:`quantize_mxfp8`.
        out_NW: uint8 ``[N, W]``, ``W >= offset + H + scale_row_bytes(H)``, bytes of a row adjacent.
        offset: first byte of the payload in each row.

    Raises:
        ArgumentError: (also a ``ValueError``) a wrong shape, dtype or offset.
    """
    if x.dim() != 2 or out_NW.dim() != 2 or x.shape[0] != out_NW.shape[0]:
        raise ArgumentError(
            f"x and out_NW must be [N, H] and [N, W] with the same N, got {list(x.shape)} and {list(out_NW.shape)}"
        )
    hidden_size = x.shape[1]
    q = unpack_mxfp8(out_NW, hidden_size, offset)
    quantize_mxfp8(x, rounding, out=q)
    scales_end = offset + hidden_size + q.scales.shape[1]
    out_NW[:, scales_end : offset + wire_payload_bytes(hidden_size, 1, mxfp8=True)].zero_()


def unpack_mxfp8(buf_NW: Tensor, hidden_size: int, offset: int = 0) -> MXFP8Tensor:
    """The MXFP8 rows inside wire rows (see :func:`pack_mxfp8`), as views of ``buf_NW``; no copy.

    Raises:
        ArgumentError: (also a ``ValueError``) ``buf_NW`` is not uint8 ``[N, W]`` with adjacent bytes in a
            row, or its rows are too short for ``hidden_size`` at ``offset``.
    """
    if buf_NW.dtype != torch.uint8 or buf_NW.dim() != 2 or (buf_NW.stride(1) != 1 and buf_NW.shape[1] > 1):
        raise ArgumentError(
            "a wire buffer must be uint8 [N, W] with the bytes of a row adjacent, got "
            f"{buf_NW.dtype} {list(buf_NW.shape)} with strides {list(buf_NW.stride())}"
        )
    needed = wire_payload_bytes(hidden_size, 1, mxfp8=True)
    if offset < 0 or offset + needed > buf_NW.shape[1]:
        raise ArgumentError(
            f"a wire row of {buf_NW.shape[1]} bytes does not hold {needed} bytes (hidden_size={hidden_size}) "
            f"at offset={offset}"
        )
    scales_at = offset + hidden_size
    return MXFP8Tensor(
        buf_NW[:, offset:scales_at].view(torch.float8_e4m3fn),
        buf_NW[:, scales_at : scales_at + hidden_size // MXFP8_BLOCK],
    )


def dequantize_packed(
    buf_NW: Tensor,
    hidden_size: int,
    dtype: torch.dtype = torch.bfloat16,
    offset: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Decode wire rows ``[N, W]`` to ``[N, H]``: :func:`unpack_mxfp8`, then :func:`dequantize_mxfp8`."""
    return dequantize_mxfp8(unpack_mxfp8(buf_NW, hidden_size, offset), dtype, out)


def _blocks_per_row(hidden_size: int, name: str) -> int:
    if hidden_size <= 0 or hidden_size % MXFP8_BLOCK:
        raise ArgumentError(f"{name} must be a positive multiple of {MXFP8_BLOCK}, got {hidden_size}")
    return hidden_size // MXFP8_BLOCK


def _check_like(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype or tensor.device != device:
        raise ArgumentError(
            f"{name} must be {dtype} {list(shape)} on {device}, got "
            f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        )


def _as_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def _chunk_rows(tensor_NH: Tensor) -> int:
    num_rows, hidden_size = tensor_NH.shape
    if devices.host_reads_are_free(tensor_NH.device):
        return max(1, min(num_rows, _CPU_CHUNK_ELEMENTS // hidden_size))
    return max(1, num_rows)


def _kernels_for(x_NH: Tensor, q: MXFP8Tensor) -> CudaKernels | None:
    """The CUDA kernels, where they are to be had and take tensors of this layout."""
    if x_NH.device.type != "cuda" or x_NH.shape[0] == 0:
        return None
    from .cuda.kernels import cuda_kernels
    from .cuda.row_ops import codec_fits

    kernels = cuda_kernels(x_NH.device)
    return kernels if kernels is not None and codec_fits(x_NH, q) else None


def _quantize_rows(x_NH: Tensor, rounding: str, out: MXFP8Tensor) -> None:
    kernels = _kernels_for(x_NH, out)
    if kernels is not None:
        from .cuda.row_ops import quantize_rows

        return quantize_rows(kernels, x_NH, rounding, out)
    num_rows, hidden_size = x_NH.shape
    blocks = hidden_size // MXFP8_BLOCK
    step = _chunk_rows(x_NH)
    value_NH = torch.empty(step, hidden_size, dtype=torch.float32, device=x_NH.device)
    magnitude_NH = torch.empty(step, hidden_size, dtype=torch.int32, device=x_NH.device)
    for first in range(0, num_rows, step):
        last = min(first + step, num_rows)
        value, magnitude = value_NH[: last - first], magnitude_NH[: last - first]
        value.copy_(x_NH[first:last])
        # Magnitudes compare like integers, NaN above infinity above every number.
        torch.bitwise_and(value.view(torch.int32), 0x7FFFFFFF, out=magnitude)
        amax_NS = magnitude.unflatten(1, (blocks, MXFP8_BLOCK)).amax(dim=2)
        # Looking at the data costs nothing on a CPU and a host sync on a GPU: only a CPU takes the short cut.
        may_be_poisoned = not devices.host_reads_are_free(x_NH.device) or bool(amax_NS.amax() >= _FP32_INF_BITS)
        poisoned_NS = amax_NS >= _FP32_INF_BITS if may_be_poisoned else None
        # The scale as FP32 bits, exponent only. No finite block has a scale byte above 247, so the bits of
        # 1 / scale are a normal number too.
        scale_NS = amax_NS.sub_(_SCALE_BIAS[rounding]).clamp_(min=0).bitwise_and_(_FP32_INF_BITS)
        inverse_NS = torch.rsub(scale_NS, 254 << 23).view(torch.float32)
        value.unflatten(1, (blocks, MXFP8_BLOCK)).mul_(inverse_NS[:, :, None])
        if rounding == "floor":
            # Not left to the cast: before torch 2.13 it turned values above 464 into NaN.
            value.clamp_(-E4M3_MAX, E4M3_MAX)
        data_NH, out_scales_NS = out.data[first:last], out.scales[first:last]
        data_NH.copy_(value)
        out_scales_NS.copy_(scale_NS.bitwise_right_shift_(23))
        if poisoned_NS is not None:
            out_scales_NS.masked_fill_(poisoned_NS, NAN_SCALE)
            bytes_blocks = data_NH.view(torch.uint8).unflatten(1, (blocks, MXFP8_BLOCK))
            bytes_blocks.masked_fill_(poisoned_NS[:, :, None], NAN_ELEMENT)


def _dequantize_rows(data_NH: Tensor, scales_NS: Tensor, out_NH: Tensor) -> None:
    kernels = _kernels_for(out_NH, MXFP8Tensor(data_NH, scales_NS))
    if kernels is not None:
        from .cuda.row_ops import dequantize_rows

        return dequantize_rows(kernels, MXFP8Tensor(data_NH, scales_NS), out_NH)
    num_rows, hidden_size = data_NH.shape
    device = data_NH.device
    step = _chunk_rows(data_NH)
    # Looking all 256 bytes up is several times faster than the CPU's cast from E4M3.
    table = torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).float()
    code_NH = torch.empty(step, hidden_size, dtype=torch.int32, device=device)
    value_NH = torch.empty(step, hidden_size, dtype=torch.float32, device=device)
    for first in range(0, num_rows, step):
        last = min(first + step, num_rows)
        code, value = code_NH[: last - first], value_NH[: last - first]
        code.copy_(data_NH[first:last].view(torch.uint8))
        torch.index_select(table, 0, code.view(-1), out=value.view(-1))
        value.unflatten(1, (-1, MXFP8_BLOCK)).mul_(_scale_values(scales_NS[first:last])[:, :, None])
        out_NH[first:last].copy_(value)


def _scale_values(scales_NS: Tensor) -> Tensor:
    """E8M0 bytes as FP32: the byte is the exponent field, but for 0 (2**-127, subnormal) and 255 (NaN)."""
    bits = scales_NS.to(torch.int32) << 23
    half = 1 << 22
    bits.clamp_(min=half).masked_fill_(scales_NS == NAN_SCALE, _FP32_INF_BITS | half)
    return bits.view(torch.float32)
