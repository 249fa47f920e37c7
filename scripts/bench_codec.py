"""How fast the plain torch MXFP8 codec is next to the bare cast to 8 bits of the same tensor.

    OMP_NUM_THREADS=1 python scripts/bench_codec.py [--rows 8192] [--hidden 2048] [--dtype bfloat16]

All contenders take turns in every round, so that a busy machine slows them all; the table gives medians
and best rounds, and on a shared machine the best say more. Outputs are allocated once, for everybody:
fresh memory would cost more than the arithmetic. The yardstick is one cast of the tensor to float8_e4m3fn
plus one read of it. The codec's bytes are checked against exact arithmetic on a sample of rows before the
timing and again after it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ep_comm.mxfp8 import MXFP8Tensor, dequantize_mxfp8, quantize_mxfp8

ROUNDINGS = ("rceil", "floor")
SAMPLE = 997


def check(x: Tensor, quantized: dict[str, MXFP8Tensor], decoded: Tensor) -> None:
    """Every 997th row: scales by their definition, elements no further from the input than half a step."""
    x_blocks = blocks_of(x)
    for rounding, q in quantized.items():
        exponents = q.scales[::SAMPLE].cpu().numpy().astype(int) - 127
        amax = np.abs(x_blocks).max(-1)
        for value, exponent in zip(amax.flat, exponents.flat, strict=True):
            scale = Fraction(2) ** int(exponent)
            target = Fraction(float(value)) / (448 if rounding == "rceil" else 256)
            right = scale / 2 < target <= scale if rounding == "rceil" else scale <= target < 2 * scale
            if not right:
                raise SystemExit(f"wrong {rounding} scale 2**{exponent} for a block maximum of {value}")
        scaled = np.clip(np.ldexp(x_blocks, -exponents[..., None]), -448, 448)
        elements = blocks_of(q.data)
        # A binade has 8 steps; below 2**-6 the steps no longer shrink.
        half_step = np.ldexp(1.0, np.frexp(np.maximum(np.abs(scaled), 2.0**-6))[1] - 5)
        if (np.abs(elements - scaled) > half_step).any():
            raise SystemExit(f"a {rounding} element is more than half a step from its input")
        if rounding == "rceil":
            values = torch.from_numpy(np.ldexp(elements, exponents[..., None])).flatten(-2)
            if not torch.equal(values.to(decoded.dtype), decoded[::SAMPLE].cpu()):
                raise SystemExit("dequantised rows are not element times scale")


def blocks_of(rows: Tensor) -> np.ndarray:
    return rows[::SAMPLE].double().unflatten(-1, (-1, 32)).cpu().numpy()


def measure(contenders: dict[str, Callable[[], object]], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Milliseconds of each contender in each round; they take turns."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for round_number in range(rounds + 2):
        for name, contender in contenders.items():
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            start = time.perf_counter()
            contender()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if round_number >= 2:
                times[name].append((time.perf_counter() - start) * 1e3)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    x = torch.randn(arguments.rows, arguments.hidden, generator=torch.Generator().manual_seed(0))
    x = x.to(device=device, dtype=dtype)
    cast, cast_back = torch.empty_like(x, dtype=torch.float8_e4m3fn), torch.empty_like(x)
    quantized = {rounding: quantize_mxfp8(x, rounding) for rounding in ROUNDINGS}
    decoded = dequantize_mxfp8(quantized["rceil"], dtype)
    check(x, quantized, decoded)

    times = measure(
        {
            "cast to float8_e4m3fn": lambda: cast.copy_(x),
            "read": lambda: x.view(torch.int16).amax(),
            "quantize rceil": lambda: quantize_mxfp8(x, "rceil", out=quantized["rceil"]),
            "quantize floor": lambda: quantize_mxfp8(x, "floor", out=quantized["floor"]),
            "dequantize": lambda: dequantize_mxfp8(quantized["rceil"], dtype, out=decoded),
            "cast back, no scales": lambda: cast_back.copy_(cast),
        },
        arguments.rounds,
        device,
    )
    check(x, quantized, decoded)
    medians = {name: statistics.median(samples) for name, samples in times.items()}
    best = {name: min(samples) for name, samples in times.items()}
    yardsticks = [ms["cast to float8_e4m3fn"] + ms["read"] for ms in (medians, best)]
    print(
        f"{arguments.dtype} [{arguments.rows}, {arguments.hidden}] on {device}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} thread(s), {arguments.rounds} rounds"
    )
    print(f"{'':24}{'median ms':>12}{'/ (cast + read)':>18}{'best ms':>12}{'/ (cast + read)':>18}")
    for name in times:
        print(
            f"{name:24}{medians[name]:12.2f}{medians[name] / yardsticks[0]:18.2f}"
            f"{best[name]:12.2f}{best[name] / yardsticks[1]:18.2f}"
        )


if __name__ == "__main__":
    main()
