"""The benchmark on GPUs: CUDA graphs of all directions over every transport, results right, host syncs counted."""

from __future__ import annotations

import pytest

from ep_comm.bench.options import DIRECTIONS, BenchOptions
from ep_comm.bench.progress import BenchProgress
from ep_comm.bench.report import Report
from ep_comm.bench.run import bench
from ep_comm.distributed import init_distributed
from tests.gpu.launch import RANKS, needs_gpus, run_gpu_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.gpus2, pytest.mark.timeout(280)]


def run_small(rank: int, world_size: int) -> Report:
    options = BenchOptions(
        tokens=(200,), hidden=(256,), experts=(16,), top_k=4, iterations=4, mode=("eager", "static", "graph"),
        dtype=("bf16", "mxfp8", "mxfp8-kept"), routing=("skewed",), contenders=("own", "torch all"),
    )  # fmt: skip
    return bench(options, init_distributed(), BenchProgress(None))


@needs_gpus(RANKS)
def test_all_modes_are_right_and_static_ones_do_not_wait() -> None:
    report = run_gpu_ranks(run_small, RANKS, timeout=250)[0]
    assert report.link is not None and not report.notes
    found = {(line.contender, line.mode, line.direction) for line in report.results}
    for transport in ("own symmetric", "own collective"):
        assert {(transport, mode, each) for mode in ("eager", "static", "graph") for each in DIRECTIONS} <= found
    for line in report.results:
        assert line.ranked, line
        waits = line.mode == "eager" and line.direction in ("dispatch", "combine")
        if line.contender.startswith("own"):
            assert (line.host_syncs > 0) == waits, line
        elif line.direction == "dispatch":
            assert line.host_syncs >= 2
