"""The scale layout of block-scaled GEMMs, byte by byte, and per expert segment."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ep_comm.errors import ArgumentError
from ep_comm.mxfp8 import quantize_mxfp8
from ep_comm.swizzle import swizzle_scales, unswizzle_scales


def naive_swizzle(scales: list[list[int]], num_cols: int) -> list[int]:
    """One byte after the other, from the formula in cuBLAS's documentation."""
    tile_rows, tile_cols = -(-len(scales) // 128), -(-num_cols // 4)
    flat = [0] * (tile_rows * tile_cols * 512)
    for row, line in enumerate(scales):
        for col, byte in enumerate(line):
            tile = (row // 128) * tile_cols + col // 4
            flat[tile * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + col % 4] = byte
    return flat


def random_scales(rows: int, cols: int) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randint(1, 256, (rows, cols), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (128, 4), (129, 5), (300, 90), (0, 4), (32, 3)])
def test_whole_matrix(rows: int, cols: int) -> None:
    scales = random_scales(rows, cols)
    swizzled = swizzle_scales(scales)
    assert swizzled.is_contiguous() and swizzled.shape == (-(-rows // 128) * 128, -(-cols // 4) * 4)
    assert swizzled.flatten().tolist() == naive_swizzle(scales.tolist(), cols)
    assert torch.equal(unswizzle_scales(swizzled, rows, cols), scales)


def test_places_by_hand() -> None:
    scales = torch.zeros(256, 8, dtype=torch.uint8)
    places = {
        (0, 0): 0, (0, 3): 3, (1, 0): 16, (32, 0): 4, (97, 2): 30,
        (0, 4): 512, (128, 0): 1024, (255, 7): 2047,
    }  # fmt: skip
    for value, (row, col) in enumerate(places, start=1):
        scales[row, col] = value
    flat = swizzle_scales(scales).flatten()
    assert [int(flat[place]) for place in places.values()] == list(range(1, len(places) + 1))
    assert int((flat != 0).sum()) == len(places)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "offsets",
    [
        [0, 16, 16, 160, 300],
        [0, 128, 256, 256],
        [0, 0, 0],
        [0, 1, 2, 3, 4, 5],
        [16, 48, 300],
        [0, 300],
        [0, 129, 258],
    ],
)
def test_expert_segments_are_padded_one_by_one(offsets: list[int], dtype: torch.dtype) -> None:
    rows, cols = 300, 6
    scales = random_scales(rows, cols)
    offsets_L1 = torch.tensor(offsets, dtype=dtype)
    swizzled = swizzle_scales(scales, offsets_L1)
    expected: list[int] = []
    for start, end in zip(offsets[:-1], offsets[1:], strict=True):
        expected += naive_swizzle(scales[start:end].tolist(), cols)
    flat = swizzled.flatten().tolist()
    assert flat[: len(expected)] == expected
    assert not any(flat[len(expected) :])
    back = unswizzle_scales(swizzled, rows, cols, offsets_L1)
    assert torch.equal(back[offsets[0] : offsets[-1]], scales[offsets[0] : offsets[-1]])
    assert not back[: offsets[0]].any() and not back[offsets[-1] :].any()


def test_the_static_bound_is_reached_and_not_passed() -> None:
    scales = random_scales(300, 4)
    # 2 experts with 1 row, one with 298: 128 + 128 + 384 rows, the most that 3 experts can make of 300.
    worst = swizzle_scales(scales, torch.tensor([0, 1, 2, 300]))
    assert worst.shape[0] == 640 and worst[-128:].any()
    assert swizzle_scales(scales, torch.tensor([0, 100, 200, 300])).shape == worst.shape


def test_no_rows_with_segments() -> None:
    empty = swizzle_scales(torch.empty(0, 4, dtype=torch.uint8), torch.tensor([0, 0, 0]))
    assert empty.shape == (0, 4)
    assert unswizzle_scales(empty, 0, 4, torch.tensor([0, 0, 0])).shape == (0, 4)


def test_method_of_a_quantised_tensor() -> None:
    q = quantize_mxfp8(torch.randn(2, 70, 160, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(q.swizzled_scales(), swizzle_scales(q.scales.flatten(0, 1)))
    offsets = torch.tensor([0, 16, 140])
    assert torch.equal(q.swizzled_scales(offsets), swizzle_scales(q.scales.flatten(0, 1), offsets))


def test_errors() -> None:
    scales = random_scales(4, 4)
    calls = {
        "scales_RS must be uint8": lambda: swizzle_scales(scales.int()),
        "two dimensions": lambda: swizzle_scales(scales[0]),
        "expert_offsets must be int32 or int64": lambda: swizzle_scales(scales, torch.zeros(3)),
        "at least two": lambda: swizzle_scales(scales, torch.zeros(1, dtype=torch.int64)),
        r"swizzled must be \[128, 4\] .* got \[128, 8\]": lambda: unswizzle_scales(
            torch.zeros(128, 8, dtype=torch.uint8), 4, 4
        ),
    }
    for message, call in calls.items():
        with pytest.raises(ArgumentError, match=message):
            call()
