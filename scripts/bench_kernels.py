"""Check and time the CUDA kernels of the symmetric transport on the GPUs of one host, and their variants.

    python scripts/bench_kernels.py                 # everything, on up to 2 GPUs
    python scripts/bench_kernels.py --check-only    # small shapes, no timing (for compute-sanitizer)

Every figure is the median over iterations of the maximum over ranks, between two CUDA events behind a device
barrier; "graph" figures are those of one operation among many in a replayed CUDA graph. Results are compared
byte for byte with plain torch before and after timing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm
import torch.multiprocessing as mp
from torch import Tensor

from ep_comm.config import round_up
from ep_comm.cuda import ops, row_ops
from ep_comm.cuda.kernels import CudaKernels
from ep_comm.cuda.window import STATE_WORDS, WindowLayout
from ep_comm.mxfp8 import dequantize_mxfp8, quantize_mxfp8, scale_row_bytes
from ep_comm.status import HEADER_WORDS, Word

ALIGNMENT = 16


@dataclass
class Work:
    """One routing, on this rank, and the kernels' answers to it."""

    kernels: CudaKernels
    window: ops.Window
    header: Tensor
    tokens_TH: Tensor
    topk_idx_TK: Tensor
    topk_weights_TK: Tensor
    num_experts: int
    max_tokens: int
    num_rows: int
    num_sms: int | None = None
    tables: ops.PlanTables | None = None
    recv: Tensor | None = None

    def plan(self) -> ops.PlanTables:
        self.tables = ops.plan(
            self.kernels, self.window, self.header, self.topk_idx_TK, self.topk_weights_TK,
            num_experts=self.num_experts, max_tokens=self.max_tokens, alignment=ALIGNMENT, num_sms=self.num_sms,
        )  # fmt: skip
        return self.tables

    def scatter(self, again: bool = False, **options):
        rows, weights, recv = ops.scatter_rows(
            self.kernels, self.window, self.tokens_TH, self.tables, self.num_rows,
            recv_rows_PTK=self.recv if again else None, max_tokens=self.max_tokens, alignment=ALIGNMENT,
            num_sms=self.num_sms, **options,
        )  # fmt: skip
        self.recv = recv
        return rows, weights

    def gather(self, rows: Tensor, **options):
        return ops.gather_sum(
            self.kernels, self.window, rows, self.tables, self.recv, max_tokens=self.max_tokens,
            num_sms=self.num_sms, **options,
        )  # fmt: skip


def open_window(layout: WindowLayout, rank: int, device: torch.device) -> tuple[ops.Window, object]:
    memory = symm.empty(layout.total_bytes, dtype=torch.uint8, device=device)
    memory.zero_()
    torch.cuda.synchronize()
    handle = symm.rendezvous(memory, dist.group.WORLD.group_name)
    window = ops.Window(
        peers=torch.tensor([int(p) for p in handle.buffer_ptrs], dtype=torch.int64, device=device),
        local=memory,
        state=torch.zeros(STATE_WORDS, dtype=torch.int32, device=device),
        first_bad=torch.full((1,), 2**31 - 1, dtype=torch.int32, device=device),
        rank=rank,
        layout=layout,
        timeout_ns=5 * 10**9,
    )
    dist.barrier()
    return window, handle


def make_work(
    kernels: CudaKernels, window: ops.Window, tokens: int, hidden: int, experts: int, top_k: int, seed: int,
    dtype: torch.dtype = torch.bfloat16, uneven: bool = False, slack: float = 1.0,
) -> Work:  # fmt: skip
    """Uniform routing without repetition, seeded by rank; the rows are what it needs times slack."""
    rank, device = window.rank, kernels.device
    generator = torch.Generator(device).manual_seed(1000 * seed + rank)
    count = tokens - 3 * rank if uneven else tokens
    scores = torch.rand(count, experts, generator=generator, device=device)
    idx = scores.topk(top_k, dim=1).indices
    if uneven:
        idx[torch.rand(idx.shape, generator=generator, device=device) < 0.2] = -1
    header = torch.zeros(HEADER_WORDS, dtype=torch.int32)
    header[Word.NUM_TOKENS], header[Word.BUDGET_ROWS] = count, 2**31 - 1
    work = Work(
        kernels, window, header.to(device),
        torch.randn(count, hidden, generator=generator, device=device).to(dtype), idx,
        torch.rand(count, top_k, generator=generator, device=device), experts, tokens, 0,
    )  # fmt: skip
    work.num_rows = round_up(int(int(work.plan().required_rows_P.max()) * slack), ALIGNMENT)
    work.scatter()
    return work


def gather_all(x: Tensor, size: int) -> list[Tensor]:
    """x of every rank, whatever its first dimension."""
    padded = torch.zeros(size, *x.shape[1:], dtype=x.dtype, device=x.device)
    padded[: len(x)] = x
    parts = [torch.empty_like(padded) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, padded)
    counts = [torch.zeros(1, dtype=torch.int64, device=x.device) for _ in parts]
    dist.all_gather(counts, torch.tensor([len(x)], device=x.device))
    return [part[: int(n)] for part, n in zip(parts, counts, strict=True)]


def same(name: str, actual: Tensor, expected: Tensor) -> None:
    if not torch.equal(actual.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)):
        differing = (actual != expected).float().mean().item()
        raise SystemExit(f"WRONG {name}: {differing:.3%} of the elements differ")


def check(work: Work, gathers: Collection[ops.GatherTuning | None] = (None,)) -> None:
    """All directions against plain torch, which knows all ranks' inputs; None is the default."""
    window, ranks = work.window, work.window.layout.ep_size
    local = work.num_experts // ranks
    idx = gather_all(work.topk_idx_TK, work.max_tokens)
    weights = gather_all(work.topk_weights_TK, work.max_tokens)
    tokens = gather_all(work.tokens_TH, work.max_tokens)
    flat = torch.cat([i.flatten() for i in idx])
    counts = torch.bincount(flat[flat >= 0], minlength=work.num_experts)
    padded = (-(-counts // ALIGNMENT) * ALIGNMENT).view(ranks, local)
    starts = (padded.cumsum(1) - padded).flatten()
    key = torch.where(flat >= 0, flat, work.num_experts)
    order = torch.sort(key, stable=True).indices[: int(counts.sum())]
    first = counts.cumsum(0) - counts
    row = torch.full_like(flat, -1)
    expert = flat[order]
    row[order] = starts[expert] + torch.arange(len(order), device=flat.device) - first[expert]
    row_of = [r.view_as(i) for r, i in zip(row.split([i.numel() for i in idx]), idx, strict=True)]

    work.plan()
    same("slot_rows", work.tables.slot_rows_TK.long(), row_of[window.rank])
    expected = work.tokens_TH.new_zeros(work.num_rows, work.tokens_TH.shape[1])
    expected_w = torch.zeros(work.num_rows, device=flat.device)
    for source in range(ranks):
        here = idx[source] // local == window.rank
        token = torch.arange(len(here), device=flat.device)[:, None].expand_as(here)
        expected[row_of[source][here]] = tokens[source][token[here]]
        expected_w[row_of[source][here]] = weights[source][here]
    rows, row_weights = work.scatter()
    same("rows", rows, expected)
    same("weights", row_weights, expected_w)
    if work.tokens_TH.shape[1] % 32 == 0:
        work.plan()
        quantised = quantize_mxfp8(expected)
        same("rows, mxfp8", work.scatter(mxfp8=True)[0], dequantize_mxfp8(quantised, dtype=expected.dtype))
        work.plan()
        kept = work.scatter(mxfp8=True, keep_mxfp8=True)[0]
        same("mxfp8 data", kept.data.view(torch.uint8), quantised.data.view(torch.uint8))
        same("mxfp8 scales", kept.scales, quantised.scales)

    outputs = gather_all(rows + rows.roll(1, 1), work.num_rows)
    scalars = torch.rand(work.num_rows, device=flat.device)
    all_scalars = gather_all(scalars, work.num_rows)
    mine, owner = row_of[window.rank], idx[window.rank] // local
    for weighted in (False, True):
        total = torch.zeros(len(mine), rows.shape[1], device=flat.device)
        for r in range(ranks):
            partial = torch.zeros_like(total)
            for k in range(mine.shape[1]):
                term = outputs[r][mine[:, k].clamp_min(0)].float()
                if weighted:
                    term = term * work.topk_weights_TK[:, k : k + 1]
                partial += torch.where((owner[:, k] == r)[:, None], term, 0.0)
            total += partial.to(rows.dtype).float()
        factors = row_weights if weighted else None
        expected_back = torch.zeros_like(work.topk_weights_TK)
        for r in range(ranks):
            expected_back = torch.where(owner == r, all_scalars[r][mine.clamp_min(0)], expected_back)
        expected_back = torch.where(mine >= 0, expected_back, 0.0)
        for tuning in gathers:
            out, back = work.gather(outputs[window.rank], row_weights_R=factors, row_scalars_R=scalars, tuning=tuning)
            same(f"sums, weighted={weighted}, {tuning}", out, total.to(rows.dtype))
            same(f"scalars, {tuning}", back, expected_back)
    if int(window.state[3]):
        raise SystemExit(f"rank {window.rank}: a wait timed out: {window.state.tolist()}")


class Timer:
    """Events on this rank, maximum over ranks, median over iterations; microseconds."""

    def __init__(self, kernels: CudaKernels, window: ops.Window, iterations: int) -> None:
        self.kernels, self.window, self.iterations = kernels, window, iterations

    def __call__(self, call: Callable[[], object]) -> float:
        for _ in range(3):
            call()
        pairs = []
        for _ in range(self.iterations):
            ops.barrier(self.kernels, self.window)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            pairs.append((start, end))
        return self._reduce([1000 * start.elapsed_time(end) for start, end in self._done(pairs)])

    def graph(self, call: Callable[[], object], copies: int = 20) -> float:
        """One ``call`` among ``copies`` in a replayed graph."""
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(copies):
                call()
        pairs = []
        for _ in range(8):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            pairs.append((start, end))
        return self._reduce([1000 * s.elapsed_time(e) / copies for s, e in self._done(pairs)[2:]])

    def _done(self, pairs):
        torch.cuda.synchronize()
        if int(self.window.state[3]):
            raise SystemExit(f"rank {self.window.rank}: a wait timed out: {self.window.state.tolist()}")
        return pairs

    def _reduce(self, times: list[float]) -> float:
        worst = torch.tensor(times, device=self.kernels.device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        return statistics.median(worst.tolist())


SCATTERS = {
    "default": ops.ScatterTuning(),
    "4 segments": ops.ScatterTuning(segments=4),
    "1 segment, lag 1": ops.ScatterTuning(segments=1, lag=1),
    "14 segments": ops.ScatterTuning(unit=512, segments=14),
    "1 block of 32 warps, 1 segment, lag 1": ops.ScatterTuning(blocks_per_sm=1, warps=32, segments=1, lag=1),
    "1 block of 32 warps, 4 segments, lag 1": ops.ScatterTuning(blocks_per_sm=1, warps=32, segments=4, lag=1),
}
MXFP8_SCATTERS = {
    "default": ops.ScatterTuning(),
    "3 blocks, 8 warps": ops.ScatterTuning(blocks_per_sm=3, warps=8),
    "1 block of 32 warps, 1 segment, lag 1": ops.ScatterTuning(blocks_per_sm=1, warps=32, segments=1, lag=1),
    "1 block of 32 warps, 4 segments, lag 1": ops.ScatterTuning(blocks_per_sm=1, warps=32, segments=4, lag=1),
}
GATHERS = {
    "ring": ops.GatherTuning(),
    "ring, lag 1/16": ops.GatherTuning(lag=-16),
    "ring, lag 4": ops.GatherTuning(lag=4),
    "ring, teams of 14 warps": ops.GatherTuning(ring=ops.RingShape(1, 3, 14, 2, 14)),
    "bulk, 2 segments": ops.GatherTuning(kernel="bulk", segments=2, lag=2),
    "bulk, 1 segment": ops.GatherTuning(kernel="bulk", segments=1, lag=2),
    "bulk, chunks of 2048 bytes, 1 segment": ops.GatherTuning(kernel="bulk", chunk_bytes=2048, segments=1, lag=2),
    "registers, 7 segments": ops.GatherTuning(kernel="registers", segments=7, lag=2),
}
CHECKED = (None, GATHERS["ring"], GATHERS["registers, 7 segments"])


def compile_all(kernels: CudaKernels) -> None:
    """Fill the disk cache on all cores; loading happens at first use."""
    from ep_comm.cuda.sources import build

    scatter = {"DTYPE": 1, "VEC_BYTES": 16}
    jobs: list[tuple[str, dict[str, int]]] = [("barrier.cu", {})]
    for t, (wire, keep) in itertools.chain(
        itertools.product(SCATTERS.values(), ((0, 0),)),
        itertools.product(MXFP8_SCATTERS.values(), ((1, 0), (1, 1))),
    ):
        jobs.append(("scatter.cu", scatter | {
            "WIRE": wire, "OUT_MXFP8": keep, "SCALE_FLOOR": 0, "WARPS": t.warps,
            "BLOCKS_PER_SM": t.blocks_per_sm, "UNROLL": t.unroll, "UNIT": t.unit}))  # fmt: skip
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda job: build(job[0], kernels.arch, job[1]), jobs))


class Report:
    """Lines printed by rank 0 and kept for --json."""

    def __init__(self, rank: int) -> None:
        self.rank, self.lines = rank, []

    def __call__(self, name: str, microseconds: float, wire_bytes: float = 0.0, **facts: object) -> None:
        self.lines.append({"name": name, "us": round(microseconds, 1), **facts})
        if self.rank == 0:
            speed = f"{wire_bytes / microseconds / 1e3:7.0f} GB/s" if wire_bytes else ""
            print(f"{microseconds:9.1f} us {speed:>13}  {name}", flush=True)


def time_variants(work: Work, timer: Timer, report: Report, quick: bool) -> None:
    hidden = work.tokens_TH.shape[1]
    owner = work.topk_idx_TK // (work.num_experts // work.window.layout.ep_size)
    away = (owner != work.window.rank).any(1).sum()
    bf16, mx = int(away) * hidden * 2.0, int(away) * (hidden + scale_row_bytes(hidden)) * 1.0
    for sms in (None,) if quick else (None, 24):
        work.num_sms = sms
        label = f"{sms or 'all'} SMs"
        for name, tuning in SCATTERS.items():
            report(f"scatter bf16, {label}, {name}", timer(lambda t=tuning: work.scatter(tuning=t)), bf16)
        for name, tuning in MXFP8_SCATTERS.items() if sms is None else ():
            for keep in (False, True):
                call = lambda t=tuning, k=keep: work.scatter(mxfp8=True, keep_mxfp8=k, tuning=t)  # noqa: E731
                report(f"scatter mxfp8 -> {'mxfp8' if keep else 'bf16'}, {label}, {name}", timer(call), mx)
        time_gathers(work, timer, report, label, bf16)
    work.num_sms = None


def time_gathers(work: Work, timer: Timer, report: Report, label: str, wire_bytes: float) -> None:
    rows, weights = work.scatter()
    for name, tuning in GATHERS.items():
        report(f"gather, {label}, {name}", timer(lambda t=tuning: work.gather(rows, tuning=t)), wire_bytes)
    report(f"gather weighted, {label}", timer(lambda: work.gather(rows, row_weights_R=weights)), wire_bytes)


def time_operations(work: Work, timer: Timer, report: Report, label: str) -> None:
    """The defaults, as the transport would call them."""

    def dispatch(**options):
        work.plan()
        return work.scatter(**options)

    rows, weights = dispatch()
    grad = torch.randn_like(rows)
    calls: dict[str, Callable[[], object]] = {
        "plan": work.plan,
        "dispatch bf16 (plan + scatter)": dispatch,
        "dispatch mxfp8 -> bf16": lambda: dispatch(mxfp8=True),
        "dispatch mxfp8 -> mxfp8": lambda: dispatch(mxfp8=True, keep_mxfp8=True),
        "combine": lambda: work.gather(rows),
        "combine, weighted": lambda: work.gather(rows, row_weights_R=weights),
        "dispatch backward": lambda: work.gather(rows, row_scalars_R=weights),
        "combine backward bf16": lambda: work.scatter(again=True),
        "combine backward mxfp8": lambda: work.scatter(again=True, mxfp8=True),
        "weighted backward (local)": lambda: row_ops.weighted_backward(
            work.kernels, rows, grad, weights, work.tables.expert_offsets_L1[-1:]
        ),
    }
    for name, call in calls.items():
        call()
        report(f"{label}: {name}", timer(call))
        report(f"{label}: {name}, graph", timer.graph(call))
    report(f"{label}: barrier, graph", timer.graph(lambda: ops.barrier(work.kernels, work.window)))


def time_link(handle, memory: Tensor, rank: int, ranks: int, report: Report, timer: Timer) -> None:
    if ranks == 1:
        return
    count = 8192 * 14336
    peer = handle.get_buffer((rank + 1) % ranks, (memory.numel(),), torch.uint8)[-count:]
    here = torch.empty(count, dtype=torch.uint8, device=memory.device)
    report("link: copy 8192 x 14336 B from the peer, both at once", timer(lambda: here.copy_(peer)), count)
    report("memory: copy of the same bytes", timer(lambda: here.copy_(memory[-count:])), 2 * count)


def worker(rank: int, ranks: int, options: argparse.Namespace) -> None:
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(options.port))
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", rank=rank, world_size=ranks, device_id=device)
    kernels = CudaKernels(device)
    report = Report(rank)
    small = WindowLayout(ranks, 64, 8, 300, 7168 * 4)
    window, _ = open_window(small, rank, device)
    for tokens, hidden, dtype, uneven in (
        (300, 2880, torch.bfloat16, True), (40, 96, torch.float16, True), (64, 7168, torch.float32, False),
        (50, 77, torch.bfloat16, True),
    ):  # fmt: skip
        check(make_work(kernels, window, tokens, hidden, 16 * ranks, 6, tokens, dtype, uneven), CHECKED)
    if rank == 0:
        print(f"small shapes: every direction equal to plain torch on {ranks} ranks", flush=True)
    if not options.check_only:
        timing(kernels, rank, ranks, report, options)
    dist.barrier()
    dist.destroy_process_group()


def timing(kernels: CudaKernels, rank: int, ranks: int, report: Report, options: argparse.Namespace) -> None:
    if rank == 0:
        compile_all(kernels)
    dist.barrier()
    hidden, experts, top_k = 7168, 256, 8
    layout = WindowLayout(ranks, experts, top_k, 8192, hidden * 2)
    window, handle = open_window(layout, rank, kernels.device)
    timer = Timer(kernels, window, options.iterations)
    time_link(handle, window.local, rank, ranks, report, timer)
    big = make_work(kernels, window, 8192, hidden, experts, top_k, 1)
    check(big, GATHERS.values())
    time_variants(big, timer, report, options.quick)
    time_operations(big, timer, report, "T 8192")
    check(big)
    for sms in (64, 48, 24):
        few = replace(big, num_sms=sms)
        few.plan()
        rows, _ = few.scatter()
        report(f"T 8192, {sms} SMs: dispatch bf16", timer(lambda w=few: (w.plan(), w.scatter())))
        report(f"T 8192, {sms} SMs: dispatch mxfp8", timer(lambda w=few: (w.plan(), w.scatter(mxfp8=True))))
        report(f"T 8192, {sms} SMs: combine", timer(lambda w=few, r=rows: w.gather(r)))
    slack = replace(big, num_rows=round_up(8192 * top_k * 5 // 4, ALIGNMENT))
    slack.plan()
    report("T 8192, budget 1.25: dispatch bf16", timer(lambda: (slack.plan(), slack.scatter())))
    report("T 8192, budget 1.25, no zero tail", timer(lambda: (slack.plan(), slack.scatter(zero_tail=False))))
    for tokens in (4096, 1024, 128):
        work = make_work(kernels, window, tokens, hidden, experts, top_k, tokens)
        time_operations(work, timer, report, f"T {tokens}")
        check(work)
    if rank == 0 and options.json:
        Path(options.json).write_text(json.dumps(report.lines, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check-only", action="store_true", help="small shapes, no timing")
    parser.add_argument("--quick", action="store_true", help="variants with all multiprocessors only")
    parser.add_argument("--iterations", type=int, default=15)
    parser.add_argument("--ranks", type=int, default=min(2, torch.cuda.device_count()))
    parser.add_argument("--port", type=int, default=29513)
    parser.add_argument("--json", help="write all figures to this file")
    options = parser.parse_args()
    mp.spawn(worker, args=(options.ranks, options), nprocs=options.ranks)


if __name__ == "__main__":
    main()
