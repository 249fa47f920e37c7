"""The CUDA kernels against the independent reference and the torch implementations, byte for byte."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from ep_comm import rows as torch_rows
from ep_comm.ledger import DispatchRecord, note_dispatch
from ep_comm.mxfp8 import dequantize_packed, pack_mxfp8, quantize_mxfp8, scale_row_bytes, unpack_mxfp8
from ep_comm.plan import CountMatrix, LocalRouting, make_plan
from ep_comm.rows import SumTable, invert_table, place_in_rows, sum_rows, take_rows
from ep_comm.status import HEADER_WORDS, FaultCode, Word
from tests import reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU"),
    pytest.mark.timeout(120),
]

if torch.cuda.is_available():
    from ep_comm.cuda import ops, row_ops
    from ep_comm.cuda.kernels import cuda_kernels, cuda_kernels_problem
    from ep_comm.cuda.window import WindowLayout

    from .ranks import EmulatedRanks

    if cuda_kernels_problem():
        pytest.skip(cuda_kernels_problem(), allow_module_level=True)

NO_LIMIT = 2**31 - 1


@dataclass
class Case:
    """One routing on all ranks, and what the reference makes of it."""

    hidden: int
    dtype: torch.dtype
    counts: tuple[int, ...]
    experts: int
    top_k: int = 4
    alignment: int = 16
    skew: float = 0.0
    masked: float = 0.1
    idx_dtype: torch.dtype = torch.int64
    seed: int = 0

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        load = torch.arange(1, self.experts + 1).float() ** -self.skew
        self.idx, self.weights, self.tokens, self.grads = [], [], [], []
        for count in self.counts:
            idx = torch.zeros(count, self.top_k, dtype=torch.int64)
            if count:
                idx = torch.multinomial(load, count * self.top_k, True, generator=generator)
                idx = idx.view(count, self.top_k)
            idx[torch.rand(idx.shape, generator=generator) < self.masked] = -1
            self.idx.append(idx)
            self.weights.append(torch.rand(count, self.top_k, generator=generator))
            for rows in (self.tokens, self.grads):
                rows.append(torch.randn(count, self.hidden, generator=generator).to(self.dtype))
        self.plan = reference.layouts([idx.tolist() for idx in self.idx], self.experts, self.alignment)
        self.rows_of = [
            torch.randn(layout.required_rows + 3, self.hidden, generator=generator).to(self.dtype)
            for layout in self.plan
        ]


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8).cpu() if x.numel() else x.cpu()


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """The same bits; a NaN may be any NaN, as conversions of it differ even between CPUs."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    if actual.dtype.is_floating_point:
        actual, expected = actual.cpu(), expected.cpu()
        assert torch.equal(actual.isnan(), expected.isnan())
        actual, expected = (x.masked_fill(x.isnan(), 0.0) for x in (actual, expected))
    assert torch.equal(bits(actual), bits(expected))


class Run:
    """A case on emulated ranks."""

    def __init__(self, case: Case, budget: int | None = None) -> None:
        self.case = case
        self.max_tokens = max(*case.counts, 1) + 1
        row_bytes = max(case.hidden * 4, case.hidden + scale_row_bytes(case.hidden + -case.hidden % 32))
        layout = WindowLayout(len(case.counts), case.experts, case.top_k, self.max_tokens, row_bytes)
        self.ranks = EmulatedRanks(layout)
        self.budget = NO_LIMIT if budget is None else budget
        self.kernels = self.ranks.kernels
        device = self.ranks.device
        self.idx = [idx.to(device, case.idx_dtype) for idx in case.idx]
        self.weights = [w.to(device) for w in case.weights]
        self.tokens = [t.to(device) for t in case.tokens]
        self.recv: list[Tensor] = []

    def header(self, rank: int) -> Tensor:
        words = [0] * HEADER_WORDS
        words[Word.NUM_TOKENS] = self.case.counts[rank]
        words[Word.BUDGET_ROWS] = self.budget
        return torch.tensor(words, dtype=torch.int32, device=self.ranks.device)

    def plan(self) -> list[ops.PlanTables]:
        headers = [self.header(rank) for rank in range(len(self.case.counts))]
        torch.cuda.synchronize()
        self.tables = self.ranks.each(
            lambda rank, window: ops.plan(
                self.kernels, window, headers[rank], self.idx[rank], self.weights[rank],
                num_experts=self.case.experts, max_tokens=self.max_tokens, alignment=self.case.alignment,
                num_sms=self.ranks.num_sms,
            )
        )  # fmt: skip
        return self.tables

    def scatter(self, extra: int = 5, first: bool = True, source: list[Tensor] | None = None, **options):
        source = source or self.tokens
        if first:
            self.plan()

        def call(rank: int, window: ops.Window):
            return ops.scatter_rows(
                self.kernels, window, source[rank], self.tables[rank],
                self.budget if self.budget != NO_LIMIT else self.case.plan[rank].required_rows + extra,
                recv_rows_PTK=None if first else self.recv[rank], max_tokens=self.max_tokens,
                alignment=self.case.alignment, num_sms=self.ranks.num_sms, **options,
            )  # fmt: skip

        results = self.ranks.each(call)
        if first:
            self.recv = [r[2] for r in results]
        return results

    def gather(self, rows: list[Tensor], **options):
        return self.ranks.each(
            lambda rank, window: ops.gather_sum(
                self.kernels, window, rows[rank], self.tables[rank], self.recv[rank],
                max_tokens=self.max_tokens,
                **{"num_sms": self.ranks.num_sms} | {name: values[rank] for name, values in options.items()},
            )
        )  # fmt: skip


CASES = {
    "two ranks": dict(hidden=256, dtype=torch.bfloat16, counts=(40, 33), experts=8),
    "H 96": dict(hidden=96, dtype=torch.bfloat16, counts=(17, 40), experts=4),
    "H 2880, four ranks, fp16": dict(hidden=2880, dtype=torch.float16, counts=(9, 0, 21, 5), experts=16),
    "fp32, skew": dict(hidden=7168, dtype=torch.float32, counts=(12, 7), experts=64, top_k=8, skew=1.5),
    "odd H": dict(hidden=77, dtype=torch.bfloat16, counts=(20, 30), experts=6, alignment=1),
    "H 4, fp16": dict(hidden=4, dtype=torch.float16, counts=(50, 60), experts=10, alignment=8),
    "no tokens": dict(hidden=64, dtype=torch.bfloat16, counts=(0, 0), experts=4),
    "all masked": dict(hidden=64, dtype=torch.bfloat16, counts=(5, 6), experts=4, masked=1.1),
    "eight ranks, K 1": dict(
        hidden=1056, dtype=torch.bfloat16, counts=(3, 8, 1, 0, 30, 2, 9, 4), experts=8, top_k=1
    ),
    "one rank": dict(hidden=512, dtype=torch.bfloat16, counts=(40,), experts=8, idx_dtype=torch.int32),
    "many tokens": dict(hidden=32, dtype=torch.bfloat16, counts=(900, 1100), experts=32, top_k=6, skew=0.7),
}  # fmt: skip


@pytest.fixture(params=CASES, scope="module")
def run(request: pytest.FixtureRequest) -> Run:
    run = Run(Case(**CASES[request.param]))
    run.plan()
    run.scatter()
    return run


def test_plan(run: Run) -> None:
    case = run.case
    needs = torch.tensor([layout.required_rows for layout in case.plan])
    for rank, (tables, layout) in enumerate(zip(run.plan(), case.plan, strict=True)):
        assert tables.tokens_per_expert_L.tolist() == layout.tokens_per_expert
        assert tables.expert_offsets_L1.tolist() == layout.expert_offsets
        assert_same(tables.required_rows_P, needs)
        assert tables.verdict.tolist() == [0, 0, max(case.counts), layout.required_rows]
        assert tables.token_counts_P.tolist() == list(case.counts)
        expected_rows = torch.full((case.counts[rank], case.top_k), -1, dtype=torch.int32)
        expected_ranks = expected_rows.clone()
        for owner, other in enumerate(case.plan):
            for row, (source, token, slot) in other.rows():
                if source == rank:
                    expected_rows[token, slot], expected_ranks[token, slot] = row, owner
        assert_same(tables.slot_rows_TK, expected_rows)
        assert_same(tables.slot_ranks_TK, expected_ranks)
        pairs = tables.matrix_PX[rank, HEADER_WORDS : HEADER_WORDS + len(case.counts)].tolist()
        local = case.experts // len(case.counts)
        owners = [set((idx[idx >= 0] // local).tolist()) for idx in case.idx[rank]]
        assert pairs == [sum(p in own for own in owners) for p in range(len(case.counts))]


def test_scatter(run: Run) -> None:
    rows, weights = reference.dispatch(run.case.plan, run.case.tokens, run.case.weights)
    for rank, (actual, row_weights, recv) in enumerate(run.scatter()):
        used = rows[rank].shape[0]
        assert_same(actual[:used], rows[rank])
        assert_same(row_weights[:used], weights[rank])
        assert not actual[used:].any() and not row_weights[used:].any()
        expected = torch.full((len(run.case.counts), run.max_tokens, run.case.top_k), -1, dtype=torch.int32)
        for row, (source, token, slot) in run.case.plan[rank].rows():
            expected[source, token, slot] = row
        for source, count in enumerate(run.case.counts):
            assert_same(recv[source, :count], expected[source, :count])


@pytest.mark.parametrize(
    "variant",
    [
        dict(lag=3, segments=0),
        dict(unit=512, segments=16),
        dict(warps=4, blocks_per_sm=1, unroll=1),
        dict(warps=32, blocks_per_sm=1, segments=4, lag=1),
        dict(lag=0, segments=0),
    ],
    ids=str,
)
def test_scatter_variants_agree(run: Run, variant: dict[str, int]) -> None:
    rows, _ = reference.dispatch(run.case.plan, run.case.tokens, run.case.weights)
    for actual, expected in zip(run.scatter(tuning=ops.ScatterTuning(**variant)), rows, strict=True):
        assert_same(actual[0][: len(expected)], expected)


@pytest.mark.parametrize("rounding", ["rceil", "floor"])
def test_scatter_mxfp8(run: Run, rounding: str) -> None:
    if run.case.hidden % 32:
        pytest.skip("MXFP8 needs a hidden size that is a multiple of 32")
    rows, _ = reference.dispatch(run.case.plan, run.case.tokens, run.case.weights, mxfp8=rounding)
    for actual, expected in zip(run.scatter(mxfp8=True, rounding=rounding), rows, strict=True):
        assert_same(actual[0][: len(expected)], expected)
        assert not actual[0][len(expected) :].any()
    plain, _ = reference.dispatch(run.case.plan, run.case.tokens, run.case.weights)
    kept = run.scatter(mxfp8=True, rounding=rounding, keep_mxfp8=True)
    for actual, expected in zip(kept, plain, strict=True):
        quantised = quantize_mxfp8(expected, rounding=rounding)
        assert_same(actual[0].data[: len(expected)].view(torch.uint8), quantised.data.view(torch.uint8))
        assert_same(actual[0].scales[: len(expected)], quantised.scales)


def test_scatter_again_uses_the_kept_table(run: Run) -> None:
    """Another dispatch in between overwrites the window's table; the route's own copy still holds."""
    expected, _ = reference.dispatch(run.case.plan, run.case.grads, run.case.weights)
    run.scatter()
    kept_tables, kept_idx = run.tables, run.idx
    run.idx = [idx.flip(0).contiguous() for idx in run.idx]
    run.plan()
    run.tables, run.idx = kept_tables, kept_idx
    grads = [g.to(run.ranks.device) for g in run.case.grads]
    for actual, rows in zip(run.scatter(first=False, source=grads), expected, strict=True):
        assert actual[1] is None
        assert_same(actual[0][: len(rows)], rows)


def gather_tuning(ring: tuple[int, ...] | None = None, **options) -> ops.GatherTuning:
    return ops.GatherTuning(ring=ring and ops.RingShape(*ring), **options)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "variant",
    [
        {},
        dict(kernel="registers", segments=2, lag=2),
        dict(kernel="registers", warps=4, batch=3, lag=0),
        dict(kernel="bulk", segments=2, lag=2),
        dict(kernel="bulk", chunk_bytes=512, unit=512, segments=16, warps=9, lag=2),
        dict(kernel="bulk", chunk_bytes=2048, warps=3, lag=5),
        dict(kernel="bulk", segments=2, lag=0),
        dict(kernel="ring"),
        dict(kernel="ring", segments=16, unit=512, lag=0),
        dict(kernel="ring", segments=2, lag=3, ring=(1, 3, 2, 1, 2)),
    ],
    ids=str,
)
def test_gather(run: Run, weighted: bool, variant: dict[str, int]) -> None:
    case, device = run.case, run.ranks.device
    outputs = [y.to(device) for y in case.rows_of]
    row_weights = [r[1] for r in run.scatter(extra=3)]
    scalars = [torch.randn(len(y), device=device) for y in outputs]
    options = {"row_scalars_R": scalars, "tuning": [gather_tuning(**variant) if variant else None] * len(outputs)}
    if weighted:
        options["row_weights_R"] = row_weights
    expected = reference.combine(case.plan, case.rows_of, case.weights, weighted)
    returned = reference.dispatch_grad_weights(case.plan, [s.cpu() for s in scalars], case.weights)
    for rank, (out, slot_scalars) in enumerate(run.gather(outputs, **options)):
        assert_same(out, expected[rank])
        assert_same(slot_scalars, returned[rank])


RING_CASES = {
    "bf16": dict(hidden=7168, dtype=torch.bfloat16, counts=(300, 270), experts=16, top_k=8),
    "fp16, most slots": dict(hidden=2048, dtype=torch.float16, counts=(60, 41), experts=64, top_k=32, skew=0.5),
    "fp32, rows in three pieces": dict(hidden=9000, dtype=torch.float32, counts=(33, 90), experts=8),
    "short rows": dict(hidden=8, dtype=torch.bfloat16, counts=(700, 512, 600), experts=6, alignment=1),
    "uneven": dict(hidden=520, dtype=torch.bfloat16, counts=(1, 0, 400, 0, 30), experts=10, top_k=6, skew=1.0),
    "eight ranks": dict(hidden=2880, dtype=torch.bfloat16, counts=(64, 50, 0, 64, 1, 33, 64, 20), experts=64, top_k=8),
}  # fmt: skip


@pytest.fixture(params=RING_CASES, scope="module")
def ring_run(request: pytest.FixtureRequest) -> tuple[Run, list[list[Tensor]]]:
    """A case whose rows have been scattered, and its sums without and with weights."""
    case = Case(**RING_CASES[request.param])
    run = Run(case)
    run.scatter(extra=3)
    return run, [reference.combine(case.plan, case.rows_of, case.weights, weighted) for weighted in (False, True)]


@pytest.mark.parametrize("num_sms", [1, 3, None])
@pytest.mark.parametrize(
    "variant",
    [
        dict(),
        dict(lag=-1),
        dict(lag=1000),
        dict(lag=0, ring=(1, 1, 1, 1, 1)),
        dict(lag=2, ring=(3, 2, 2, 3, 5)),
        dict(lag=-3, unit=256, segments=16, ring=(1, 4, 7, 4, 14)),
    ],
    ids=str,
)
def test_gather_ring(ring_run: tuple[Run, list[list[Tensor]]], num_sms: int | None, variant: dict[str, int]) -> None:
    """Teams of several shapes, on few and many blocks, with and without weights and scalars."""
    run, expected = ring_run
    ranks, device = len(run.case.counts), run.ranks.device
    rows = [y.to(device) for y in run.case.rows_of]
    weights = run.scatter(extra=3)
    options = {"tuning": [gather_tuning(**variant)] * ranks, "num_sms": [num_sms or run.ranks.num_sms] * ranks}
    for weighted in (False, True):
        scalars = [torch.randn(len(y), device=device) for y in rows]
        returned = reference.dispatch_grad_weights(run.case.plan, [s.cpu() for s in scalars], run.case.weights)
        more = {"row_weights_R": [r[1] for r in weights]} if weighted else {"row_scalars_R": scalars}
        for rank, (out, slot_scalars) in enumerate(run.gather(rows, **options, **more)):
            assert_same(out, expected[weighted][rank])
            if weighted:
                assert slot_scalars is None
            else:
                assert_same(slot_scalars, returned[rank])


def test_ranks_may_sum_by_different_kernels() -> None:
    """Where the rows of one rank are not aligned, it alone takes another kernel."""
    run = Run(Case(hidden=1032, dtype=torch.bfloat16, counts=(300, 200, 250), experts=12))
    run.scatter(extra=3)
    expected = reference.combine(run.case.plan, run.case.rows_of, run.case.weights, False)
    aligned = [y.to(run.ranks.device) for y in run.case.rows_of]
    odd = [torch.cat([y.new_zeros(1), y.flatten()])[1:].view_as(y) for y in aligned]
    # Each kernel is compiled and loaded before one of them waits for the other.
    for rows in (aligned, odd, [odd[0], aligned[1], odd[2]]):
        for segments in (0, 4):
            tuning = ops.GatherTuning(kernel="ring", segments=segments)
            for rank, (out, _) in enumerate(run.gather(rows, tuning=[tuning] * 3)):
                assert_same(out, expected[rank])


@pytest.mark.parametrize("kernel", ["ring", "bulk", "registers"])
def test_a_peer_that_does_not_sum_ends_the_wait(kernel: str) -> None:
    run = Run(Case(hidden=256, dtype=torch.bfloat16, counts=(200, 100), experts=8))
    run.scatter()
    window = run.ranks.windows[0]
    window.timeout_ns = 50_000_000
    rows = torch.ones(run.case.plan[0].required_rows, 256, dtype=torch.bfloat16, device=run.ranks.device)
    ops.gather_sum(
        run.kernels, window, rows, run.tables[0], run.recv[0], max_tokens=run.max_tokens, num_sms=2,
        tuning=ops.GatherTuning(kernel=kernel, segments=2, lag=2),
    )  # fmt: skip
    torch.cuda.synchronize()
    assert window.state[3:5].tolist() == [3, 1]


def test_budget_drops_rows_beyond_it_and_says_so() -> None:
    case = Case(hidden=64, dtype=torch.bfloat16, counts=(30, 50), experts=8)
    budget = min(layout.required_rows for layout in case.plan) - 20
    run = Run(case, budget=budget)
    for rank, (tables, layout) in enumerate(zip(run.plan(), case.plan, strict=True)):
        assert tables.verdict.tolist() == [1, 0, 50, layout.required_rows]
        assert tables.required_rows_P[rank] == layout.required_rows
        assert int(tables.slot_rows_TK.max()) < budget
        assert tables.expert_offsets_L1.tolist() == [min(o, budget) for o in layout.expert_offsets]
    rows, weights = reference.dispatch(case.plan, case.tokens, case.weights)
    for rank, (actual, row_weights, _) in enumerate(run.scatter()):
        assert_same(actual, rows[rank][:budget])
        assert_same(row_weights, weights[rank][:budget])
    rows = [torch.randn(budget, 64, device=run.ranks.device).bfloat16() for _ in range(2)]
    sums = [
        run.gather(rows, tuning=[ops.GatherTuning(kernel=kernel, segments=1, lag=2)] * 2)
        for kernel in ("ring", "bulk", "registers")
    ]
    for other in sums[1:]:
        assert all(torch.equal(a[0], b[0]) for a, b in zip(sums[0], other, strict=True))


def test_ids_out_of_range_are_reported_to_every_rank_and_route_nowhere() -> None:
    case = Case(hidden=32, dtype=torch.bfloat16, counts=(6, 7), experts=8, masked=0.0)
    run = Run(case)
    run.idx[1][3, 2] = 8
    run.idx[1][5, 0] = -(2**40)
    for tables in run.plan():
        assert tables.verdict[1] == 1
        fault = tables.matrix_PX[1, Word.FAULT : Word.FAULT + 4].tolist()
        assert fault == [FaultCode.EXPERT_ID, 3, 2, 8]
        assert tables.matrix_PX[0, Word.FAULT] == 0
    assert run.tables[1].slot_rows_TK[3, 2] == -1 and run.tables[1].slot_ranks_TK[5, 0] == -1
    for bad in (-(2**40), -2, 2**33 + 5):
        run.idx[1][3, 2] = bad
        halves = run.plan()[0].matrix_PX[1, Word.FAULT + 3 : Word.FAULT + 5].tolist()
        assert halves[1] << 32 | halves[0] & 0xFFFFFFFF == bad
    run.idx[1].copy_(case.idx[1])
    assert all(tables.verdict[1] == 0 for tables in run.plan())


def test_operations_follow_each_other_without_host_syncs() -> None:
    """Buffer reuse: many operations are queued at once, and the ranks run far apart."""
    case = Case(hidden=512, dtype=torch.bfloat16, counts=(64, 40, 10), experts=12, seed=3)
    run = Run(case)
    run.plan()
    run.scatter()
    expected, _ = reference.dispatch(case.plan, case.tokens, case.weights)
    sums = reference.combine(case.plan, expected, case.weights, False)
    # Everything is compiled and loaded before kernels wait for kernels that this thread has yet to launch.
    run.gather([rows.to(run.ranks.device) for rows in expected])
    run.ranks.each(lambda rank, window: ops.barrier(run.kernels, window))
    torch.cuda._sleep(1)
    results: list[list[tuple[Tensor, Tensor]]] = [[] for _ in case.counts]
    headers = [run.header(rank) for rank in range(3)]
    torch.cuda.synchronize()
    for step in range(20):

        def call(rank: int, window: ops.Window, step: int = step) -> None:
            if (step + rank) % 3 == 0:
                torch.cuda._sleep(200_000)
            tables = ops.plan(
                run.kernels, window, headers[rank], run.idx[rank], run.weights[rank],
                num_experts=12, max_tokens=run.max_tokens, alignment=16,
            )  # fmt: skip
            rows, _, recv = ops.scatter_rows(
                run.kernels, window, run.tokens[rank], tables, case.plan[rank].required_rows,
                max_tokens=run.max_tokens, alignment=16, num_sms=run.ranks.num_sms,
            )  # fmt: skip
            out, _ = ops.gather_sum(
                run.kernels, window, rows, tables, recv, max_tokens=run.max_tokens, num_sms=run.ranks.num_sms
            )
            results[rank].append((rows, out))

        run.ranks.launch(call)
    run.ranks.each(lambda rank, window: ops.barrier(run.kernels, window))
    for rank in range(3):
        for rows, out in results[rank]:
            assert_same(rows, expected[rank])
            assert_same(out, sums[rank])


def test_absent_peer_sets_the_error_instead_of_hanging() -> None:
    run = Run(Case(hidden=32, dtype=torch.bfloat16, counts=(4, 4), experts=4))
    run.ranks.windows[0].timeout_ns = 50_000_000
    ops.barrier(run.kernels, run.ranks.windows[0])
    torch.cuda.synchronize()
    assert run.ranks.windows[0].state[3:6].tolist() == [4, 1, 1]  # barrier, waiting for rank 1, first epoch


HARD = [0.0, -0.0, 1.0, 448.0, 465.0, 1e-40, -3e38, float("inf"), float("nan"), 2**-9 * 1.5, 1.75, 1.7500001]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rounding", ["rceil", "floor"])
@pytest.mark.parametrize("hidden", [32, 96, 2880, 7168])
def test_codec(dtype: torch.dtype, rounding: str, hidden: int) -> None:
    kernels = cuda_kernels(torch.device("cuda", 0))
    generator = torch.Generator().manual_seed(hidden)
    x = torch.randn(70, hidden, generator=generator) * torch.exp2(
        torch.randint(-60, 60, (70, hidden // 32), generator=generator).float()
    ).repeat_interleave(32, 1)
    x[:12, 5] = torch.tensor(HARD)
    x[20:32, :] = torch.tensor(HARD)[:, None]
    x = x.to(dtype)
    expected = torch.full((70, hidden + scale_row_bytes(hidden)), 0xAA, dtype=torch.uint8)
    pack_mxfp8(x, rounding, expected)
    # Wire rows with something in front of the payload and behind it, and rows of x that are apart.
    wire = torch.full((70, expected.shape[1] + 48), 0xAA, dtype=torch.uint8, device="cuda")
    apart = torch.zeros(70, hidden + 64, dtype=dtype, device="cuda")
    apart[:, 32 : 32 + hidden] = x.cuda()
    q = unpack_mxfp8(wire, hidden, 16)
    assert row_ops.codec_fits(apart[:, 32 : 32 + hidden], q)
    row_ops.quantize_rows(kernels, apart[:, 32 : 32 + hidden], rounding, q)
    wire[:, 16 + hidden + hidden // 32 : -32] = 0
    assert_same(wire[:, 16:-32], expected)
    assert (wire[:, :16] == 0xAA).all() and (wire[:, -32:] == 0xAA).all()
    back = torch.zeros_like(apart)
    row_ops.dequantize_rows(kernels, q, back[:, 32 : 32 + hidden])
    assert_same(back[:, 32 : 32 + hidden], dequantize_packed(expected, hidden, dtype))
    assert not back[:, :32].any() and not back[:, 32 + hidden :].any()


def test_codec_decodes_every_byte_and_scale() -> None:
    kernels = cuda_kernels(torch.device("cuda", 0))
    elements = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 16)
    wire = torch.cat([elements, scales], 1)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        back = torch.empty(256, 256, dtype=dtype, device="cuda")
        row_ops.dequantize_rows(kernels, unpack_mxfp8(wire.cuda(), 256), back)
        assert_same(back, dequantize_packed(wire, 256, dtype))


@pytest.mark.parametrize("hidden", [1, 5, 96, 256, 257, 512, 2880, 4096, 7168])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_weighted_backward(hidden: int, dtype: torch.dtype) -> None:
    kernels = cuda_kernels(torch.device("cuda", 0))
    y, grad = (torch.randn(37, hidden, device="cuda").to(dtype) for _ in range(2))
    y[3] = -0.0
    weights = torch.rand(37, device="cuda")
    used = torch.tensor([30], device="cuda")
    rows, dots = row_ops.weighted_backward(kernels, y, grad, weights, used)
    assert_same(rows[:30], torch_rows.scale_rows(grad, weights)[:30].cpu())
    assert_same(dots[:30], torch_rows.row_dot(y.cpu(), grad.cpu())[:30])
    assert not rows[30:].any() and not dots[30:].any()


@pytest.mark.parametrize("hidden", [1, 3, 50, 96, 2880, 7168])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_sums_by_a_table(hidden: int, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    """The bits of the CPU, from strided rows to strided rows; items with none to eight entries."""
    make = torch.Generator().manual_seed(hidden)
    rows = torch.randn(200, hidden + 16, generator=make).to(dtype)[:, 8 : 8 + hidden]
    rows[7] = -0.0
    table = torch.randint(0, 200, (60, 8), generator=make)
    table = torch.where(torch.rand(60, 8, generator=make) < 0.5, table, -1)
    table[3], table[4] = -1, torch.tensor([7] + [-1] * 7)
    weights = torch.randn(200, generator=make)
    for factors in (None, weights):
        want = torch.empty(60, hidden, dtype=out_dtype)
        sum_rows(rows, SumTable.build(table, 480), factors, want)
        room = torch.full((60, hidden + 16), 5.0, dtype=out_dtype, device="cuda")
        got = room[:, 8 : 8 + hidden]
        there = torch.empty(200, hidden + 16, dtype=dtype, device="cuda")[:, 8 : 8 + hidden].copy_(rows)
        sums = SumTable.build(table.cuda(), 480)
        sum_rows(there, sums, factors if factors is None else factors.cuda(), got)
        assert_same(got, want)
        assert (room[:, :8] == 5).all() and (room[:, 8 + hidden :] == 5).all()
    places = torch.where(torch.rand(60, 8, generator=make) < 0.5, torch.randperm(480, generator=make).view(60, 8), -1)
    for values in (torch.randn(8, 60, generator=make).t(), torch.arange(60).unsqueeze(1).expand(60, 8)):
        want = place_in_rows(values, places, 480, missing=-3)
        assert torch.equal(place_in_rows(values.cuda(), places.cuda(), 480, missing=-3).cpu(), want)
    assert torch.equal(invert_table(places.cuda(), 480, 60).cpu(), invert_table(places, 480, 60))
    empty = torch.full((2, hidden), 3.0, dtype=dtype, device="cuda")
    nothing = SumTable.build(torch.full((2, 8), -1, device="cuda"), 16)
    sum_rows(torch.empty(0, hidden, dtype=dtype, device="cuda"), nothing, None, empty)
    assert not empty.any()


@pytest.mark.parametrize("width", [1, 2, 3, 24, 96, 2880, 14336])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float8_e4m3fn, torch.float32], ids=str)
@pytest.mark.parametrize("count", [0, 1, 3000])
def test_rows_by_a_table(width: int, dtype: torch.dtype, count: int) -> None:
    make = torch.Generator().manual_seed(width)
    size = torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(0, 256, (77, (width + 16) * size), generator=make, dtype=torch.uint8)
    index = torch.randint(0, 77, (count,), generator=make)
    rows = raw.cuda().view(dtype)[:, 16 : 16 + width]
    got = take_rows(rows, index.cuda())
    want = raw[index].view(torch.uint8)[:, 16 * size : (16 + width) * size]
    assert_same(got.view(torch.uint8), want)
    room = torch.zeros(count, width + 32, dtype=torch.uint8, device="cuda").repeat(1, size).view(dtype)
    take_rows(rows, index.cuda(), room[:, 16 : 16 + width])
    assert_same(room[:, 16 : 16 + width].contiguous().view(torch.uint8), want)
    assert not room.view(torch.uint8)[:, : 16 * size].any() and not room.view(torch.uint8)[:, -16 * size :].any()


@pytest.mark.parametrize("idx_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "ep_size"),
    [(0, 4, 8, 2), (1, 1, 1, 1), (7, 8, 16, 4), (513, 5, 12, 3), (4096, 8, 256, 4), (20000, 8, 4096, 64)],
)
def test_the_plan_of_the_collective_transport(
    tokens: int, top_k: int, experts: int, ep_size: int, idx_dtype: torch.dtype
) -> None:
    """Every field of the plan is that of the CPU: masks, skew, repeated and invalid ids, budgets and pair limits."""
    make = torch.Generator().manual_seed(tokens)
    config = SimpleNamespace(num_experts=experts)
    layout = CountMatrix(config, ep_size)
    for case in ("uniform", "skewed", "masked", "invalid"):
        idx = [
            torch.randint(0, experts, (tokens, top_k), generator=make) for _ in range(ep_size if tokens < 9999 else 2)
        ]
        for each in idx:
            if case == "skewed":
                each[torch.rand(tokens, top_k, generator=make) < 0.8] = experts - 1
            if case in ("masked", "invalid"):
                each[torch.rand(tokens, top_k, generator=make) < 0.3] = -1
            if case == "invalid" and tokens:
                each[tokens // 2, top_k - 1] = -7 if idx_dtype == torch.int32 else -(2**40)
                each[tokens - 1, 0] = experts
        plans = {}
        for device in ("cpu", "cuda"):
            routings = [LocalRouting.build(each.to(idx_dtype).to(device), experts, ep_size) for each in idx]
            messages = []
            for rank in range(ep_size):
                budget = max(1, tokens * top_k // (1 + rank % 2))
                header = layout.header(1, 0, tokens, 0, budget)
                routing = routings[rank % len(routings)]
                messages.append(layout.message(header, routing.fault, routing))
            plans[device, "messages"] = [
                *messages,
                layout.message(header, [7, -1, 2**31 - 1, -(2**31), 5], routings[0]),
                layout.message(header, [9, 1, 2, 3, 4], device=torch.device(device, *[0] * (device == "cuda"))),
            ]
            for limit in (None, tokens // 2):
                plans[device, limit] = [
                    make_plan(routings[rank], torch.stack(messages), layout, rank=rank, alignment=16, pair_limit=limit)
                    for rank in range(len(routings))
                ]
            plans[device, "local"] = routings
        for here, there in zip(plans["cpu", "messages"], plans["cuda", "messages"], strict=True):
            assert_same(there.cpu(), here)
        for key in (None, tokens // 2, "local"):
            for here, there in zip(plans["cpu", key], plans["cuda", key], strict=True):
                for name, want in vars(here).items():
                    got = getattr(there, name)
                    if name == "position_TK":  # means nothing for a slot without an expert
                        want, got = want * (here.idx_TK >= 0), got * (there.idx_TK >= 0)
                    if isinstance(want, Tensor):
                        assert got.dtype == want.dtype and torch.equal(got.cpu(), want), f"{case} {key} {name}"
                    else:
                        assert got == want, f"{case} {key} {name}"


def test_shared_memory_that_was_larger_before() -> None:
    """A launch with less shared memory in between takes nothing away from the next with more."""
    for experts in (4096, 2048, 4096):
        idx = torch.arange(64).view(8, 8) * (experts // 64)
        want, got = (LocalRouting.build(each, experts, 4) for each in (idx, idx.cuda()))
        assert torch.equal(got.counts_E.cpu(), want.counts_E) and torch.equal(got.position_TK.cpu(), want.position_TK)


@pytest.mark.parametrize("ep_size", [1, 2, 4, 64])
@pytest.mark.parametrize("overflow_dtype", [torch.bool, torch.int32], ids=str)
def test_the_record_of_dispatches(ep_size: int, overflow_dtype: torch.dtype) -> None:
    """Peaks, sums and the first fault over several dispatches are those of the CPU."""
    make = torch.Generator().manual_seed(ep_size)
    rank, experts = ep_size - 1, 2 * ep_size
    records = {device: DispatchRecord(ep_size, torch.device(device)) for device in ("cpu", "cuda")}
    sent = {device: torch.zeros((), dtype=torch.int64, device=device) for device in records}
    for turn in range(6):
        matrix = torch.randint(0, 1000, (ep_size, HEADER_WORDS + ep_size + experts), generator=make, dtype=torch.int32)
        matrix[:, Word.FAULT] = 0
        if turn in (2, 4):
            matrix[(turn * 7) % ep_size, Word.FAULT] = turn
        required = torch.randint(0, 10**12, (ep_size,), generator=make)
        for device, record in records.items():
            there = matrix.to(device)
            plan = SimpleNamespace(
                rank=rank,
                matrix_PX=there,
                pair_tokens_PP=there[:, HEADER_WORDS : HEADER_WORDS + ep_size],
                required_rows_P=required.to(device),
                overflow=torch.tensor(turn == 3, device=device).to(overflow_dtype),
            )
            kept = None if turn == 5 else record
            note_dispatch(plan, kept, sent[device])
        assert records["cuda"].words.tolist() == records["cpu"].words.tolist()
        assert sent["cuda"].item() == sent["cpu"].item()


def test_addresses_beyond_32_bits() -> None:
    """Rows whose byte offset, and whose element offset, exceed 2**31."""
    hidden, count = 7168, 1_000
    case = Case(hidden=hidden, dtype=torch.bfloat16, counts=(3,), experts=2, top_k=1, masked=0.0, alignment=1)
    run = Run(case)
    run.plan()
    num_rows = 2**32 // hidden // 2 * 2 + count
    run.tables[0].slot_rows_TK.copy_(torch.tensor([[num_rows - 1], [num_rows // 2], [0]]))
    run.tables[0].expert_offsets_L1.fill_(num_rows)
    run.tables[0].tokens_per_expert_L.fill_(0)
    out, _, recv = ops.scatter_rows(
        run.kernels, run.ranks.windows[0], run.tokens[0], run.tables[0], num_rows,
        max_tokens=run.max_tokens, alignment=1, zero_tail=False,
    )  # fmt: skip
    assert out.numel() > 2**32
    for token, row in enumerate((num_rows - 1, num_rows // 2, 0)):
        assert_same(out[row], case.tokens[0][token])
    for kernel in ("ring", "bulk", "registers"):
        back, _ = ops.gather_sum(
            run.kernels, run.ranks.windows[0], out, run.tables[0], recv, max_tokens=run.max_tokens,
            tuning=ops.GatherTuning(kernel=kernel, segments=1, lag=2),
        )  # fmt: skip
        assert_same(back, case.tokens[0])
