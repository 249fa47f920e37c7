"""The model of expected times: its terms by hand and by counting, its page, and what was measured."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from ep_comm.errors import ConfigError
from ep_comm.time_model import Links, Workload, markdown_table, predict, reach

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "time_model.md").read_text(encoding="utf-8")

# ep-comm check on four H200 of one host, 2026-11-29, and ep-comm bench for the collective transport there; speeds of
# links as it measured them. "2 hosts": NCCL_HOSTID made two hosts of two, so that NCCL went through sockets; their
# speed (1.44) is fitted to the first of these eight figures.
FOUR = {
    "1 host, symmetric": (Workload(4, 4), Links(local=356), "symmetric", ((580, 528), (385, 528))),
    "1 host, collective": (
        Workload(4, 4, tokens=8192), Links(local=246), "collective", ((2097, 2036), (1599, 2036)),
    ),
    "2 hosts, collective": (
        Workload(4, 2), Links(local=246, network=1.44), "collective", ((73668, 72048), (39681, 70237)),
    ),
    "2 hosts, hierarchical": (
        Workload(4, 2), Links(local=246, network=1.44), "hierarchical", ((41419, 38473), (22879, 38140)),
    ),
}  # fmt: skip

# docs/kernels.md: two H200, symmetric transport, microseconds.
MEASURED = {
    "dispatch bf16": {8192: 393, 4096: 216, 1024: 77, 128: 28},
    "dispatch mxfp8": {8192: 359, 4096: 191, 1024: 67, 128: 29},
    "dispatch mxfp8_kept": {8192: 262, 4096: 146, 1024: 57, 128: 27},
    "combine bf16": {8192: 404, 4096: 217, 1024: 76, 128: 19},
}


def model(kind: str, tokens: int) -> float:
    direction, wire = kind.split()
    return predict(Workload(2, 2, tokens=tokens), Links(), "symmetric", direction, wire).microseconds


def checked_table() -> str:
    """Model and measurement side by side, as the page has it."""
    sizes = list(next(iter(MEASURED.values())))
    lines = ["| | " + " | ".join(f"T = {size}" for size in sizes) + " |", "|---" * (len(sizes) + 1) + "|"]
    for kind, times in MEASURED.items():
        cells = [f"{model(kind, size):.0f} / {measured}" for size, measured in times.items()]
        lines.append(f"| {kind.replace('_kept', ', rows kept')} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def table_of_four() -> str:
    """The same for :data:`FOUR`."""
    lines = ["| | wire | dispatch | combine |", "|---|---|---|---|"]
    for name, (work, links, transport, measured) in FOUR.items():
        for wire, times in zip(("bf16", "mxfp8"), measured, strict=True):
            cells = [
                f"{predict(work, links, transport, direction, wire).microseconds:,.0f} / {time:,}"
                for direction, time in zip(("dispatch", "combine"), times, strict=True)
            ]
            lines.append(f"| {name} | {wire} | {' | '.join(cells)} |")
    return "\n".join(lines)


def on_page(name: str) -> str:
    return re.search(rf"<!-- table: {name} -->\n(.*?)\n<!-- end of table -->", PAGE, re.DOTALL).group(1)


def test_the_page_shows_what_the_functions_say() -> None:
    assert on_page("ep-comm check --model") == markdown_table(Links())
    assert on_page("two ranks") == checked_table()
    assert on_page("four ranks") == table_of_four()


@pytest.mark.parametrize("kind", MEASURED)
def test_model_against_measurement(kind: str) -> None:
    for tokens, measured in MEASURED[kind].items():
        assert model(kind, tokens) == pytest.approx(measured, rel=0.14)


@pytest.mark.parametrize("name", FOUR)
def test_model_of_four_ranks_against_measurement(name: str) -> None:
    work, links, transport, measured = FOUR[name]
    for wire, times in zip(("bf16", "mxfp8"), measured, strict=True):
        for direction, time in zip(("dispatch", "combine"), times, strict=True):
            assert predict(work, links, transport, direction, wire).microseconds == pytest.approx(time, rel=0.21)


def test_reach_by_hand() -> None:
    # Two of four experts: needed unless both choices fall on the other two, one of six pairs.
    assert reach(4, 2, 2) == pytest.approx(5 / 6)
    assert reach(4, 4, 1) == 1.0 and reach(4, 1, 4) == 1.0
    assert reach(8, 1, 2) == pytest.approx(2 / 8)


def test_rows_against_counting() -> None:
    # 8 ranks on hosts of 4, 64 experts: count what a random routing sends.
    work = Workload(8, 4, tokens=20000, hidden_size=32, num_experts=64, top_k=6)
    make = torch.Generator().manual_seed(0)
    experts = torch.rand(work.tokens, 64, generator=make).topk(6, dim=1).indices
    ranks = torch.zeros(work.tokens, 8, dtype=torch.bool).scatter_(1, experts // 8, True)
    hosts = ranks.view(-1, 2, 4).any(2)
    flat = predict(work, Links(), "collective")
    assert flat.network_bytes / 64 == pytest.approx(int(ranks[:, 4:].sum()), rel=0.02)
    assert flat.local_bytes / 64 == pytest.approx(int(ranks[:, 1:4].sum()), rel=0.02)
    two_levels = predict(work, Links(), "hierarchical")
    assert two_levels.network_bytes / 64 == pytest.approx(int(hosts[:, 1].sum()), rel=0.02)
    # Both hosts' tokens of its rail are forwarded to three ranks.
    assert two_levels.local_bytes / 64 == pytest.approx(2 * int(ranks[:, 1:4].sum()), rel=0.02)


def test_times_by_hand() -> None:
    # One expert a token, all experts equal: half of 1000 tokens of 2000 bytes go to the other rank.
    work = Workload(2, 1, tokens=1000, hidden_size=1000, num_experts=2, top_k=1)
    links = Links(local=1.0, network=0.5, memory=1e6, collective_us=7.0, table_us=1.0)
    there = predict(work, links, "collective")
    assert there.network_bytes == pytest.approx(1e6) and there.local_bytes == 0
    assert there.microseconds == pytest.approx(2 * 7 + 1 + 1e6 / 0.5e3, rel=0.01)
    assert there.bound_by == "network"
    close = predict(Workload(2, 2, tokens=1000, hidden_size=1000, num_experts=2, top_k=1), links, "symmetric")
    assert close.microseconds == pytest.approx(22 + 1e6 / 1e3, rel=0.01)
    assert close.bound_by == "local"


@pytest.mark.parametrize(
    ("sizes", "transport", "message"),
    [
        ((16, 8), "symmetric", "several hosts"),
        ((128, 128), "symmetric", "at most 64 ranks"),
        ((8, 8), "hierarchical", "several hosts with several ranks each"),
        ((8, 8), "carrier pigeon", "must be one of symmetric, collective, hierarchical"),
    ],
)
def test_transports_that_cannot_serve(sizes: tuple[int, int], transport: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        predict(Workload(*sizes), Links(), transport)


def test_bad_sizes_and_speeds() -> None:
    with pytest.raises(ConfigError, match="ep_size must be a multiple of ranks_per_host, got 12 and 8"):
        Workload(12)
    with pytest.raises(ConfigError, match="num_experts must be a multiple of ep_size"):
        Workload(24, num_experts=256)
    with pytest.raises(ConfigError, match="network must be a number above 0, got 0"):
        Links(network=0)
    with pytest.raises(ConfigError, match="wire must be"):
        predict(Workload(8), Links(), "collective", "dispatch", "fp4")
