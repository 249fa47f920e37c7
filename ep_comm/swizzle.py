"""The order in which block-scaled GEMMs want the scales of an MXFP8 matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from .config import round_up, worst_case_rows
from .errors import ArgumentError

__all__ = ["swizzle_scales", "unswizzle_scales"]

TILE_ROWS, TILE_COLS = 128, 4


@torch.no_grad()
def swizzle_scales(scales_RS: Tensor, expert_offsets: Tensor | None = None) -> Tensor:
    """Scales in the 128x4 blocked layout that cuBLAS and CUTLASS block-scaled GEMMs read.

    The matrix is padded with zero bytes to multiples of 128 rows and 4 columns and cut into 128x4 tiles,
    stored one after the other, row by row of tiles. Inside a tile's 512 bytes, row ``r`` and column ``c``
    are at ``(r % 32) * 16 + (r // 32) * 4 + c`` (cuBLAS documentation, "1D block scaling factors layout").

    Args:
        scales_RS: uint8 ``[R, S]``.
        expert_offsets: int32 or int64 ``[L + 1]``: the segment of expert ``e`` is the rows from
            ``expert_offsets[e]`` to ``expert_offsets[e + 1]``. Every segment is then padded to 128 rows by
            itself and they follow one another; rows outside all segments are dropped.

    Returns:
        uint8 ``[R', S']``, contiguous, whose *memory* is the sequence of tiles (``R'``, ``S'`` the padded
        sizes). With ``expert_offsets`` ``R'`` is what any offsets could need and the rest is zero: its
        size depends on shapes only, so no host sync is needed.

    Raises:
        ArgumentError: (also a ``ValueError``) a wrong shape or dtype.
    """
    _check_scale_matrix("scales_RS", scales_RS)
    num_rows, num_cols = scales_RS.shape
    padded_rows, padded_cols = _swizzled_shape(num_rows, num_cols, expert_offsets)
    padded = scales_RS.new_zeros(padded_rows, padded_cols)
    if expert_offsets is None or num_rows == 0:
        padded[:num_rows, :num_cols] = scales_RS
    else:
        starts, ends, padded_starts, padded_ends = _segments(expert_offsets)
        row, inside = _map_rows(padded_rows, padded_starts, padded_ends, starts, ends - starts, num_rows)
        padded[:, :num_cols] = scales_RS.index_select(0, row) * inside[:, None]
    tiles = padded.view(padded_rows // TILE_ROWS, 4, 32, padded_cols // TILE_COLS, TILE_COLS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(padded_rows, padded_cols)


@torch.no_grad()
def unswizzle_scales(swizzled: Tensor, num_rows: int, num_cols: int, expert_offsets: Tensor | None = None) -> Tensor:
    """Undo :func:`swizzle_scales`: uint8 ``[num_rows, num_cols]``; rows outside all segments are zero.

    Raises:
        ArgumentError: (also a ``ValueError``) ``swizzled`` is not what ``swizzle_scales`` makes of
            ``[num_rows, num_cols]``.
    """
    _check_scale_matrix("swizzled", swizzled)
    shape = _swizzled_shape(num_rows, num_cols, expert_offsets)
    if tuple(swizzled.shape) != shape:
        raise ArgumentError(
            f"swizzled must be {list(shape)} for {num_rows} rows of {num_cols} scales, got {list(swizzled.shape)}"
        )
    padded_rows, padded_cols = shape
    tiles = swizzled.reshape(padded_rows // TILE_ROWS, padded_cols // TILE_COLS, 32, 4, TILE_COLS)
    padded = tiles.permute(0, 3, 2, 1, 4).reshape(padded_rows, padded_cols)
    if expert_offsets is None or num_rows == 0:
        return padded[:num_rows, :num_cols].contiguous()
    starts, ends, padded_starts, _ = _segments(expert_offsets)
    row, inside = _map_rows(num_rows, starts, ends, padded_starts, ends - starts, padded_rows)
    return padded[:, :num_cols].index_select(0, row) * inside[:, None]


def _check_scale_matrix(name: str, scales: Tensor) -> None:
    if scales.dtype != torch.uint8 or scales.dim() != 2:
        raise ArgumentError(f"{name} must be uint8 with two dimensions, got {scales.dtype} {list(scales.shape)}")


def _swizzled_shape(num_rows: int, num_cols: int, expert_offsets: Tensor | None) -> tuple[int, int]:
    if expert_offsets is None:
        rows = round_up(num_rows, TILE_ROWS)
    else:
        integer = expert_offsets.dtype in (torch.int32, torch.int64)
        if not integer or expert_offsets.dim() != 1 or expert_offsets.shape[0] < 2:
            raise ArgumentError(
                "expert_offsets must be int32 or int64 [L + 1] with at least two entries, got "
                f"{expert_offsets.dtype} {list(expert_offsets.shape)}"
            )
        rows = worst_case_rows(num_rows, expert_offsets.shape[0] - 1, TILE_ROWS)
    return rows, round_up(num_cols, TILE_COLS)


def _segments(expert_offsets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """First and last-plus-one rows of the experts' segments: compact, and with each padded to 128 rows."""
    offsets = expert_offsets.to(torch.int64)
    starts, ends = offsets[:-1], offsets[1:]
    padded = (ends - starts + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
    padded_ends = padded.cumsum(0)
    return starts, ends, padded_ends - padded, padded_ends


def _map_rows(
    num_rows: int, starts: Tensor, ends: Tensor, other_starts: Tensor, lengths: Tensor, other_rows: int
) -> tuple[Tensor, Tensor]:
    """For each of ``num_rows`` rows of one layout: its row in the other, and whether it has one."""
    row = torch.arange(num_rows, device=starts.device)
    expert = torch.searchsorted(ends.contiguous(), row, right=True).clamp_(max=ends.shape[0] - 1)
    within = row - starts[expert]
    inside = (within >= 0) & (within < lengths[expert])
    return (other_starts[expert] + within).clamp_(0, other_rows - 1), inside
