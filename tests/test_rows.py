"""Copies and sums of rows on one rank, against loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ep_comm import devices
from ep_comm import rows as rows_module
from ep_comm.rows import (
    SumTable,
    invert_table,
    pick_from_rows,
    place_in_rows,
    row_dot,
    scale_rows,
    sum_rows,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("chunk_bytes", [1, 1 << 20])
@pytest.mark.parametrize("host_reads", [True, False])
def test_sums_follow_the_slot_order(
    dtype: torch.dtype, weighted: bool, chunk_bytes: int, host_reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products are rounded before they are added, one slot after the other, in FP32."""
    monkeypatch.setattr(rows_module, "_CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(devices, "host_reads_are_free", lambda device: host_reads)
    make = torch.Generator().manual_seed(0)
    table = torch.randint(-1, 50, (70, 6), generator=make)
    values = (torch.randn(50, 33, generator=make) * 10.0 ** torch.randint(-3, 4, (50, 1), generator=make)).to(dtype)
    weights = torch.rand(50, generator=make) if weighted else None
    expected = torch.zeros(70, 33)
    for item in range(70):
        for row in table[item].tolist():
            if row >= 0:
                product = values[row].float() if weights is None else values[row].float() * weights[row]
                expected[item] = expected[item] + product
    # Strided on both sides, as in wire buffers.
    source = torch.full((50, 40), float("nan"), dtype=dtype)[:, :33].copy_(values)
    out = torch.full((70, 40), float("nan"), dtype=dtype)[:, :33]
    sum_rows(source, SumTable.build(table, table.numel()), weights, out)
    assert torch.equal(out, expected.to(dtype))


def test_sums_of_nothing() -> None:
    for table in (torch.full((3, 2), -1), torch.empty(0, 2, dtype=torch.int64)):
        out = torch.full((len(table), 4), float("nan"))
        sum_rows(torch.empty(0, 4), SumTable.build(table, 0), None, out)
        assert torch.equal(out, torch.zeros(len(table), 4))


def test_sums_read_only_rows_in_the_table() -> None:
    values = torch.full((4, 3), float("nan"))
    values[2] = 1.0
    out = torch.empty(2, 3)
    sum_rows(values, SumTable.build(torch.tensor([[2, -1], [-1, -1]]), 4), None, out)
    assert torch.equal(out, torch.tensor([[1.0] * 3, [0.0] * 3]))


def test_tables_both_ways() -> None:
    table = torch.tensor([[3, -1], [0, 4], [-1, -1]])
    assert invert_table(table, 6, missing=9).tolist() == [1, 9, 9, 0, 1, 9]
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    placed = place_in_rows(values, table, 6, missing=0.0)
    assert placed.tolist() == [3.0, 0.0, 0.0, 1.0, 4.0, 0.0]
    assert pick_from_rows(placed, table).tolist() == [[1.0, 0.0], [3.0, 4.0], [0.0, 0.0]]
    assert pick_from_rows(torch.empty(0), torch.full((2, 2), -1)).tolist() == [[0.0, 0.0]] * 2


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(1, 130), st.integers(0, 5), st.sampled_from(DTYPES), st.integers(0, 99))
def test_row_dot_is_the_halving_sum(width: int, count: int, dtype: torch.dtype, seed: int) -> None:
    make = torch.Generator().manual_seed(seed)
    a = torch.randn(count, width, generator=make).to(dtype)
    b = torch.randn(count, width, generator=make).to(dtype)
    size = 1
    while size < width:
        size *= 2
    for row in range(count):
        terms = [x * y for x, y in zip(a[row].float(), b[row].float(), strict=True)]
        terms += [torch.tensor(0.0)] * (size - width)
        while len(terms) > 1:
            half = len(terms) // 2
            terms = [terms[i] + terms[i + half] for i in range(half)]
        assert torch.equal(row_dot(a, b)[row], terms[0])
    assert row_dot(a, b).shape == (count,)


def test_scaled_rows_are_rounded_once() -> None:
    make = torch.Generator().manual_seed(1)
    values, weights = torch.randn(5, 7, generator=make).bfloat16(), torch.rand(5, generator=make)
    expected = torch.stack([(row.float() * weight).bfloat16() for row, weight in zip(values, weights, strict=True)])
    assert torch.equal(scale_rows(values, weights), expected)
