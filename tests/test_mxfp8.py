"""The MXFP8 codec against gfloat's E4M3, ml_dtypes' decoding and scales in exact rational arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ep_comm import mxfp8
from ep_comm.errors import ArgumentError, EPError
from ep_comm.mxfp8 import (
    MXFP8Tensor,
    dequantize_mxfp8,
    dequantize_packed,
    pack_mxfp8,
    quantize_mxfp8,
    scale_row_bytes,
    unpack_mxfp8,
    wire_payload_bytes,
)

ROUNDINGS = ("rceil", "floor")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FP32_MAX = torch.finfo(torch.float32).max


def exact_scale_byte(amax: float, rounding: str) -> int:
    """The definition itself, in rational numbers."""
    if amax == 0:
        return 0
    target = Fraction(amax) / 448 if rounding == "rceil" else Fraction(amax)
    power = target.numerator.bit_length() - target.denominator.bit_length() - 1
    while Fraction(2) ** (power + 1) <= target:
        power += 1
    # Now 2**power <= target < 2**(power + 1).
    if rounding == "floor":
        power -= 8
    elif Fraction(2) ** power != target:
        power += 1
    return min(max(power + 127, 0), 254)


def exact_bytes(x: Tensor, rounding: str) -> tuple[np.ndarray, np.ndarray]:
    """Element and scale bytes of ``x [N, H]`` by gfloat; a float64 holds every quotient exactly."""
    # Here, so that a GPU machine without gfloat still compares its bytes with the CPU's.
    gfloat = pytest.importorskip("gfloat")
    e4m3 = pytest.importorskip("gfloat.formats").format_info_ocp_e4m3
    blocks = x.double().numpy().reshape(-1, 32)
    elements = np.full(blocks.shape, 0x7F, np.uint8)
    scales = np.full(len(blocks), 0xFF, np.uint8)
    for i, block in enumerate(blocks):
        if not np.isfinite(block).all():
            continue
        scales[i] = exact_scale_byte(float(np.abs(block).max()), rounding)
        quotient = np.ldexp(block, 127 - int(scales[i]))
        rounded = gfloat.round_ndarray(e4m3, quotient, gfloat.RoundMode.TiesToEven, sat=True)
        magnitude = gfloat.encode_ndarray(e4m3, np.abs(rounded))
        elements[i] = magnitude.astype(np.uint8) | (np.signbit(block).astype(np.uint8) << 7)
    return elements.reshape(x.shape), scales.reshape(x.shape[0], -1)


def assert_exact(x: Tensor, rounding: str) -> MXFP8Tensor:
    q = quantize_mxfp8(x, rounding)
    elements, scales = exact_bytes(x, rounding)
    assert q.data.dtype == torch.float8_e4m3fn and q.scales.dtype == torch.uint8
    np.testing.assert_array_equal(q.scales.numpy(), scales)
    np.testing.assert_array_equal(q.data.view(torch.uint8).numpy(), elements)
    return q


def bits_equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def one_block(values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor([values + [0.0] * (32 - len(values))], dtype=dtype)


# Quantisation


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden_size", [32, 96, 2880])
def test_gaussian_rows_of_many_sizes(hidden_size: int, dtype: torch.dtype, rounding: str) -> None:
    generator = torch.Generator().manual_seed(hidden_size)
    rows = 3 if hidden_size == 2880 else 40
    x = torch.randn(rows, hidden_size, generator=generator)
    x = x * torch.exp2(torch.randint(-12, 12, (rows, 1), generator=generator))
    assert_exact(x.to(dtype), rounding)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_every_bfloat16_value(rounding: str) -> None:
    # Sorted by magnitude a block spans few binades, shuffled it spans many.
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = every[every.isfinite()].reshape(-1, 32)
    assert_exact(finite, rounding)
    assert_exact(finite.T.reshape(-1, 32), rounding)


@pytest.mark.parametrize(("rounding", "offset"), [("rceil", 0x1FFFFF), ("floor", 0)])
def test_scale_at_each_exponent_and_border(rounding: str, offset: int) -> None:
    # One block for each FP32 exponent and mantissas around 1, 1.75 and 2.
    mantissas = torch.tensor([0, 1, 0x5FFFFF, 0x600000, 0x600001, 0x7FFFFF], dtype=torch.int32)
    bits = (torch.arange(255, dtype=torch.int32)[:, None] << 23) + mantissas
    amax = bits.flatten().view(torch.float32)
    x = torch.zeros(len(amax), 32)
    x[:, 7] = -amax
    x[:, 20] = amax / 3
    q = assert_exact(x, rounding)
    assert q.scales[-1] == 247 - (rounding == "floor")  # the largest FP32 number, 1.99 * 2**127


def test_hand_computed_scales() -> None:
    amax = [448.0, 449.0, 464.0, 224.0, 256.0, 1.75, 2.0, 512.0, 1.0, 0.0, 2.0**-149, 2.0**-118, FP32_MAX]
    x = torch.zeros(len(amax), 32)
    x[:, 0] = torch.tensor(amax)
    rceil = [127, 128, 128, 126, 127, 119, 120, 128, 119, 0, 0, 1, 247]
    floor = [127, 127, 127, 126, 127, 119, 120, 128, 119, 0, 0, 1, 246]
    assert quantize_mxfp8(x, "rceil").scales.flatten().tolist() == rceil
    assert quantize_mxfp8(x, "floor").scales.flatten().tolist() == floor


def test_hand_computed_elements() -> None:
    # 448 pins the scale to 1. Ties go to the even code; 2**-9 is the smallest subnormal.
    values = {
        448.0: 0x7E, -448.0: 0xFE, 432.0: 0x7E, 431.0: 0x7D, 1.0: 0x38, 1.0625: 0x38, 1.1875: 0x3A,
        1.07: 0x39, 2.0**-6: 0x08, 2.0**-9: 0x01, 2.0**-10: 0x00, 1.01 * 2.0**-10: 0x01,
        1.5 * 2.0**-9: 0x02, 2.5 * 2.0**-9: 0x02, 7.5 * 2.0**-9: 0x08, -0.0: 0x80, -(2.0**-10): 0x80,
        -(2.0**-30): 0x80, 2.0**-149: 0x00,
    }  # fmt: skip
    q = quantize_mxfp8(one_block(list(values)), "rceil")
    assert q.scales.tolist() == [[127]]
    assert q.data.view(torch.uint8)[0, : len(values)].tolist() == list(values.values())


@pytest.mark.parametrize("dtype", DTYPES)
def test_floor_saturates_what_rceil_rescales(dtype: torch.dtype) -> None:
    # torch before 2.13 casts 465 to NaN: the codec must clamp by itself.
    x = one_block([464.0, 466.0, 480.0, -510.0, 448.0, 440.0], dtype)
    floor = quantize_mxfp8(x, "floor")
    assert floor.scales.tolist() == [[127]]
    assert floor.data.float()[0, :6].tolist() == [448, 448, 448, -448, 448, 448]
    rceil = quantize_mxfp8(x, "rceil")
    assert rceil.scales.tolist() == [[128]]
    assert rceil.dequantize(torch.float32)[0, :6].tolist() == [448, 480, 480, -512, 448, 448]


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_zeros_and_subnormal_inputs(rounding: str) -> None:
    x = torch.zeros(4, 32)
    x[1] = -0.0
    x[2] = 2.0**-149 * torch.arange(32)
    x[3] = 2.0**-127 * torch.linspace(-1, 1, 32)
    q = assert_exact(x, rounding)
    assert q.scales.flatten().tolist() == [0, 0, 0, 0]
    assert q.data.view(torch.uint8)[:2].unique(dim=1).flatten().tolist() == [0x00, 0x80]
    assert (q.data.float()[3] != 0).all()


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [math.nan, -math.nan, math.inf, -math.inf])
def test_nan_and_infinity_poison_their_block_only(poison: float, dtype: torch.dtype, rounding: str) -> None:
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(1)).to(dtype)
    clean = quantize_mxfp8(x, rounding)
    x[2, 40] = math.copysign(1.0, poison)
    x[2, 41] = poison
    q = quantize_mxfp8(x, rounding)
    assert q.scales[2, 1] == 0xFF
    assert (q.data[2, 32:64].view(torch.uint8) == 0x7F).all()
    for dequantized_dtype in DTYPES:
        assert q.dequantize(dequantized_dtype)[2, 32:64].isnan().all()
    keep = torch.ones(5, 96, dtype=torch.bool)
    keep[2, 32:64] = False
    assert torch.equal(q.data.view(torch.uint8)[keep], clean.data.view(torch.uint8)[keep])
    assert torch.equal(q.scales[keep[:, ::32]], clean.scales[keep[:, ::32]])


def test_nan_payloads_do_not_leak_into_the_bytes() -> None:
    bits = torch.full((1, 32), 0x3F800000, dtype=torch.int32)
    bits[0, :4] = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, -0x7FFFFF], dtype=torch.int32)
    q = quantize_mxfp8(bits.view(torch.float32))
    assert q.scales.tolist() == [[0xFF]] and (q.data.view(torch.uint8) == 0x7F).all()


@settings(max_examples=150)
@given(
    bits=st.lists(st.integers(0, 2**32 - 1), min_size=32, max_size=32),
    shift=st.integers(0, 12),
    rounding=st.sampled_from(ROUNDINGS),
)
def test_any_fp32_bits(bits: list[int], shift: int, rounding: str) -> None:
    raw = np.array(bits, np.uint32)
    # The second row narrows the exponents so that most of its elements do not vanish.
    narrow = (raw & 0x807FFFFF) | ((((raw >> 23) & 7) + 20 * shift) << 23).astype(np.uint32)
    assert_exact(torch.from_numpy(np.stack([raw, narrow]).view(np.float32)), rounding)


# Shapes, strides, chunks


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_and_leading_shapes_do_not_matter(dtype: torch.dtype) -> None:
    x = torch.randn(4, 6, 64, generator=torch.Generator().manual_seed(2)).to(dtype)
    expected = quantize_mxfp8(x)
    assert expected.shape == (4, 6, 64) and expected.scales.shape == (4, 6, 2)
    views = {
        "transposed": x.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        "outer swapped": x.transpose(0, 1).contiguous().transpose(0, 1),
        "every other": torch.stack([x, -x], dim=-1).flatten(-2)[..., ::2],
        "rows of a wider buffer": torch.cat([x, x], dim=-1)[..., :64],
    }
    for name, view in views.items():
        q = quantize_mxfp8(view)
        assert bits_equal(q.data, expected.data), name
        assert bits_equal(q.scales, expected.scales), name
        out = torch.empty_like(view)
        assert dequantize_mxfp8(expected, dtype, out=out) is out
        assert torch.equal(out, expected.dequantize(dtype)), name
    vector = quantize_mxfp8(x[1, 2])
    assert bits_equal(vector.data, expected.data[1, 2]) and bits_equal(vector.scales, expected.scales[1, 2])


def test_out_may_have_any_strides() -> None:
    x = torch.randn(4, 6, 64, generator=torch.Generator().manual_seed(3))
    x[1, 2, 3] = math.nan
    expected = quantize_mxfp8(x)
    data = torch.zeros(6, 64, 4, dtype=torch.uint8).view(torch.float8_e4m3fn).permute(2, 0, 1)
    scales = torch.zeros(6, 2, 4, dtype=torch.uint8).permute(2, 0, 1)
    q = quantize_mxfp8(x, out=MXFP8Tensor(data, scales))
    assert q.data is data and q.scales is scales
    assert bits_equal(data.contiguous(), expected.data) and torch.equal(scales, expected.scales)
    assert torch.equal(q.dequantize()[0], expected.dequantize()[0])


@pytest.mark.parametrize("shape", [(0, 64), (3, 0, 64)])
def test_no_rows(shape: tuple[int, ...]) -> None:
    q = quantize_mxfp8(torch.empty(shape, dtype=torch.bfloat16))
    assert q.shape == shape and q.scales.shape == (*shape[:-1], 2)
    assert q.dequantize().shape == shape


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(11, 96, generator=torch.Generator().manual_seed(4))
    x[7, 5] = math.inf
    whole = quantize_mxfp8(x, "floor")
    monkeypatch.setattr(mxfp8, "_CPU_CHUNK_ELEMENTS", 3 * 96 + 1)
    chunked = quantize_mxfp8(x, "floor")
    assert bits_equal(chunked.data, whole.data) and bits_equal(chunked.scales, whole.scales)
    assert bits_equal(dequantize_mxfp8(chunked), dequantize_mxfp8(whole))


def test_flush_to_zero_leaves_ordinary_values_alone() -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(5))
    x *= torch.exp2(torch.arange(-100.0, 28, 16))[:, None]
    expected = quantize_mxfp8(x)
    rows = dequantize_mxfp8(expected)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU has no flush-to-zero mode")
    try:
        flushed = quantize_mxfp8(x)
        flushed_rows = dequantize_mxfp8(expected)
    finally:
        torch.set_flush_denormal(False)
    assert bits_equal(flushed.data, expected.data) and bits_equal(flushed.scales, expected.scales)
    assert bits_equal(flushed_rows, rows)


# Dequantisation


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_element_byte_under_every_scale_byte(dtype: torch.dtype) -> None:
    elements = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 8)
    got = dequantize_mxfp8(MXFP8Tensor(elements.view(torch.float8_e4m3fn), scales), dtype)
    decoded = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    product = np.ldexp(decoded[None, :], np.arange(256)[:, None] - 127)
    product[255] = np.nan
    expected = torch.from_numpy(product).to(dtype)
    assert torch.equal(got.isnan(), expected.isnan())
    assert got.isnan().sum() == 255 * 2 + 256
    finite = ~expected.isnan()
    assert bits_equal(got[finite], expected[finite])
    if dtype != torch.float16:
        assert got[254, 0x39] == 1.125 * 2.0**127
        assert got[0, 0x01] == (2.0**-136 if dtype == torch.float32 else 0)


def test_overflow_and_single_rounding_by_hand() -> None:
    def value(element: int, scale: int, dtype: torch.dtype) -> float:
        data = torch.full((1, 32), element, dtype=torch.uint8).view(torch.float8_e4m3fn)
        scales = torch.tensor([[scale]], dtype=torch.uint8)
        return dequantize_mxfp8(MXFP8Tensor(data, scales), dtype)[0, 0].item()

    assert value(0x7E, 247, torch.float32) == math.inf and value(0xFE, 254, torch.bfloat16) == -math.inf
    assert value(0x7E, 246, torch.float32) == 1.75 * 2.0**127
    assert value(0x7E, 134, torch.float16) == 57344.0 and value(0x7E, 135, torch.float16) == math.inf
    # 15 * 2**-134 and 13 * 2**-134 are halfway between bfloat16 subnormals, multiples of 2**-133.
    assert value(0x1F, 0, torch.bfloat16) == 8 * 2.0**-133
    assert value(0x1D, 0, torch.bfloat16) == 6 * 2.0**-133
    assert value(0x80, 200, torch.float32) == 0 and math.copysign(1, value(0x80, 200, torch.float32)) == -1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_quantising_again_changes_nothing(rounding: str, dtype: torch.dtype) -> None:
    x = torch.randn(200, 128, generator=torch.Generator().manual_seed(6)).to(dtype)
    q = quantize_mxfp8(x, rounding)
    again = quantize_mxfp8(q.dequantize(dtype), rounding)
    assert bits_equal(again.dequantize(dtype), q.dequantize(dtype))
    # Under rceil a largest element that rounds down to 224 makes room for half the scale: other bytes, same
    # values. Under floor the scale stays.
    largest = (q.data.view(torch.uint8) & 0x7F).unflatten(1, (-1, 32)).amax(-1)
    same = largest > 0x76 if rounding == "rceil" else torch.ones_like(largest, dtype=torch.bool)
    assert same.any() and torch.equal(again.scales[same], q.scales[same])
    same = same.repeat_interleave(32, dim=1)
    assert torch.equal(again.data.view(torch.uint8)[same], q.data.view(torch.uint8)[same])


# Wire rows


@pytest.mark.parametrize(("hidden_size", "expected"), [(32, 16), (512, 16), (544, 32), (2880, 96), (7168, 224)])
def test_wire_sizes(hidden_size: int, expected: int) -> None:
    assert scale_row_bytes(hidden_size) == expected
    assert wire_payload_bytes(hidden_size, 2, mxfp8=True) == hidden_size + expected
    assert wire_payload_bytes(hidden_size, 2, mxfp8=False) == 2 * hidden_size


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("hidden_size", "offset", "slack"), [(32, 0, 0), (96, 5, 3), (2880, 32, 16)])
def test_packed_rows(hidden_size: int, offset: int, slack: int, dtype: torch.dtype) -> None:
    x = torch.randn(7, hidden_size, generator=torch.Generator().manual_seed(7)).to(dtype)
    x[3, 17] = math.nan
    payload = wire_payload_bytes(hidden_size, dtype.itemsize, mxfp8=True)
    wire = torch.full((7, offset + payload + slack), 0xAB, dtype=torch.uint8)
    pack_mxfp8(x, "floor", wire, offset)
    expected = quantize_mxfp8(x, "floor")
    scales_at, scales_end = offset + hidden_size, offset + hidden_size + hidden_size // 32
    assert torch.equal(wire[:, offset:scales_at], expected.data.view(torch.uint8))
    assert torch.equal(wire[:, scales_at:scales_end], expected.scales)
    assert (wire[:, scales_end : offset + payload] == 0).all()
    assert (wire[:, :offset] == 0xAB).all() and (wire[:, offset + payload :] == 0xAB).all()
    q = unpack_mxfp8(wire, hidden_size, offset)
    assert q.data.data_ptr() == wire.data_ptr() + offset  # a view
    assert bits_equal(q.data.contiguous(), expected.data) and torch.equal(q.scales, expected.scales)
    rows = dequantize_packed(wire, hidden_size, dtype, offset)
    assert torch.equal(rows.nan_to_num(), expected.dequantize(dtype).nan_to_num())
    out = torch.empty_like(rows)
    assert dequantize_packed(wire, hidden_size, dtype, offset, out=out) is out
    assert torch.equal(out.nan_to_num(), rows.nan_to_num())


def test_packing_no_rows() -> None:
    wire = torch.empty(0, 112, dtype=torch.uint8)
    pack_mxfp8(torch.empty(0, 96), "rceil", wire)
    assert dequantize_packed(wire, 96).shape == (0, 96)


def test_gradients_stop_at_the_codec() -> None:
    x = torch.randn(2, 32, requires_grad=True)
    q = quantize_mxfp8(x)
    assert not q.data.requires_grad and not dequantize_mxfp8(q).requires_grad


# Errors name the argument, its value and what is allowed


def test_errors() -> None:
    x = torch.zeros(2, 64)
    q = quantize_mxfp8(x)
    wire = torch.zeros(2, 80, dtype=torch.uint8)
    calls = {
        "dimension of x must be a positive multiple of 32, got 48": lambda: quantize_mxfp8(x[:, :48]),
        "positive multiple of 32, got 0": lambda: quantize_mxfp8(x[:, :0]),
        "scalar": lambda: quantize_mxfp8(torch.zeros(())),
        "float32, bfloat16 or float16, got torch.float64": lambda: quantize_mxfp8(x.double()),
        "'rceil', 'floor', got 'up'": lambda: quantize_mxfp8(x, "up"),
        r"out.data must be .*\[2, 64\].* got .*\[1, 64\]": lambda: quantize_mxfp8(
            x, out=MXFP8Tensor(q.data[:1], q.scales)
        ),
        r"out.scales must be .*\[2, 2\]": lambda: quantize_mxfp8(x, out=MXFP8Tensor(q.data, q.scales[:, :1])),
        "dtype must be .* got torch.float64": lambda: dequantize_mxfp8(q, torch.float64),
        "q.data must be float8_e4m3fn": lambda: dequantize_mxfp8(MXFP8Tensor(x, q.scales)),
        "q.scales must be": lambda: dequantize_mxfp8(MXFP8Tensor(q.data, q.scales.int())),
        "out must be torch.float16": lambda: dequantize_mxfp8(q, torch.float16, out=x),
        "hidden_size must be a positive multiple of 32, got 33": lambda: scale_row_bytes(33),
        "same N": lambda: pack_mxfp8(x[:1], "rceil", wire),
        "80 bytes does not hold 80 bytes .* offset=1": lambda: pack_mxfp8(x, "rceil", wire, 1),
        "does not hold .* offset=-1": lambda: unpack_mxfp8(wire, 32, -1),
        "must be uint8": lambda: unpack_mxfp8(wire.int(), 64),
        "adjacent": lambda: unpack_mxfp8(wire[:, ::2], 32),
    }
    for message, call in calls.items():
        with pytest.raises(ArgumentError, match=message) as raised:
            call()
        assert isinstance(raised.value, (ValueError, EPError))


# On a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU")
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_gives_the_same_bytes_and_is_never_waited_for(dtype: torch.dtype, rounding: str) -> None:
    generator = torch.Generator().manual_seed(8)
    bits = torch.randint(-(2**31), 2**31, (512, 96), generator=generator).to(torch.int32)
    anything = bits.view(torch.float32).to(dtype)
    ordinary = torch.randn(512, 96, generator=generator).to(dtype)
    x = torch.cat([anything, ordinary])
    offsets = torch.tensor([0, 16, 400, 1024])
    x_gpu, offsets_gpu = x.cuda(), offsets.cuda()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        q = quantize_mxfp8(x_gpu, rounding)
        rows = dequantize_mxfp8(q, dtype)
        swizzled = q.swizzled_scales(offsets_gpu)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    expected = quantize_mxfp8(x, rounding)
    assert bits_equal(q.data.cpu(), expected.data) and torch.equal(q.scales.cpu(), expected.scales)
    expected_rows = dequantize_mxfp8(expected, dtype)
    assert torch.equal(rows.isnan().cpu(), expected_rows.isnan())
    assert bits_equal(rows.cpu()[~expected_rows.isnan()], expected_rows[~expected_rows.isnan()])
    assert torch.equal(swizzled.cpu(), expected.swizzled_scales(offsets))
