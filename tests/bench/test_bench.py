"""A benchmark on two ranks: every contender that can run, the table, the JSON, planted faults."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ep_comm.bench.contenders import make_contenders
from ep_comm.bench.options import DIRECTIONS, BenchOptions
from ep_comm.bench.plot import plot_report
from ep_comm.bench.progress import BenchProgress
from ep_comm.bench.referee import Referee
from ep_comm.bench.report import COLUMNS, Report, print_begin, print_end, print_shape, to_json
from ep_comm.bench.run import bench
from ep_comm.cli.main import run
from ep_comm.distributed import init_distributed
from tests.bench.planted import Failing, Late, Swapped, Unable
from tests.harness import run_ranks
from tests.train.tiny import run_program

TINY: dict[str, Any] = {
    "tokens": (24,), "hidden": (64,), "experts": (8,), "top_k": 3, "iterations": 3, "warmup": 1, "timeout": 60.0,
    "dtype": ("bf16", "mxfp8", "mxfp8-kept"), "routing": ("uniform", "skewed"),
}  # fmt: skip


def run_tiny(rank: int, world_size: int, faults: bool) -> Report:
    options = BenchOptions(**{**TINY, **({"routing": ("uniform",), "dtype": ("bf16",)} if faults else {})})
    contenders = (
        [Failing(), Unable(), *make_contenders(options)] if faults else [*make_contenders(options), Swapped(), Late()]
    )
    return bench(options, init_distributed(), BenchProgress(None), contenders=contenders)


@pytest.fixture(scope="module")
def reports() -> list[Report]:
    return run_ranks(run_tiny, 2, False, timeout=150)


def test_all_ranks_report_the_same(reports: list[Report]) -> None:
    assert to_json(reports[0]) == to_json(reports[1])


def test_everything_asked_for_is_measured_and_right(reports: list[Report]) -> None:
    report = reports[0]
    found = {(r.contender, r.shape.routing, r.direction, r.dtype, r.mode) for r in report.results}
    for routing in ("uniform", "skewed"):
        for mode in ("eager", "static"):
            for direction in DIRECTIONS:
                dtypes = {"dispatch": TINY["dtype"], "combine_backward": TINY["dtype"][:2]}.get(direction, ("bf16",))
                for dtype in dtypes:
                    assert ("own collective", routing, direction, dtype, mode) in found
        assert ("torch all-to-all", routing, "combine", "bf16", "eager") in found
    assert len(found) == len(report.results)
    for line in report.results:
        if line.contender not in ("swapped", "late"):
            assert line.ranked and line.wrong is None and line.problem is None, line
            assert line.microseconds > 0 and line.fastest <= line.microseconds <= line.slowest
            exact = line.contender == "own collective" or line.direction in ("dispatch", "combine_backward")
            assert line.check == ("bitwise" if exact else "rounded")
            assert line.host_syncs is None and line.sms == "-"


def test_planted_wrong_contenders_are_marked_and_not_ranked(reports: list[Report]) -> None:
    """One is wrong from the start, the other only after its results were checked for the first time."""
    wrong = [line for line in reports[0].results if line.contender in ("swapped", "late")]
    assert len(wrong) == 2 * 2 * len(DIRECTIONS)
    for line in wrong:
        assert not line.ranked and line.wrong.startswith("rank 1: 2 of ")
        assert line in reports[0].of(line.shape, line.direction)[-2:]
    text = printed(reports[0])
    assert text.count("WRONG") == len(wrong) and "rank 1: 2 of" in text


def test_who_cannot_run_is_listed_with_the_reason(reports: list[Report]) -> None:
    reasons = {each.contender: each.reason for each in reports[0].not_run}
    assert "not a CUDA GPU" in reasons["own symmetric"]
    for name in ("torchao MXFP8", "Megatron-Core", "DeepEP"):
        assert "not importable" in reasons[name] or "needs GPUs" in reasons[name]
    assert all(f"{name}: {reason}"[:60] in printed(reports[0]) for name, reason in reasons.items())


def test_wire_bytes_are_rows_times_row_bytes(reports: list[Report]) -> None:
    """Rows of 64 elements: bf16 128 bytes and mxfp8 64 + 2 scale bytes, padded to 16, with K = 3 fp32 and int32."""
    lines = {(r.contender, r.direction, r.dtype): r for r in reports[0].results if r.shape.routing == "uniform"}
    dense, small = (lines["own collective", "dispatch", dtype].wire_bytes for dtype in ("bf16", "mxfp8"))
    assert dense / (128 + 16 + 16) == pytest.approx(small / (80 + 16 + 16))
    pairs = lines["torch all-to-all", "dispatch", "bf16"].wire_bytes / (128 + 4)
    assert lines["torch all-to-all", "combine", "bf16"].wire_bytes == pytest.approx(pairs * 128, abs=1)
    assert 24 * 0.8 < dense / 160 <= 24 < pairs < 24 * 3


def test_table_has_its_columns_in_80_characters(reports: list[Report]) -> None:
    lines = printed(reports[0]).splitlines()
    (heading,) = (line for line in lines if line.startswith("contender"))
    assert heading.split() == [name for name, _ in COLUMNS]
    rows = [line for line in lines if line.startswith("own collective") and "bitwise" in line]
    assert len(rows) == sum(line.contender == "own collective" for line in reports[0].results)
    assert max(len(row.rstrip()) for row in (heading, *rows)) <= 80
    assert "link: " in lines[1]


def test_json_holds_every_line(reports: list[Report]) -> None:
    document = json.loads(to_json(reports[0]))
    assert len(document["results"]) == len(reports[0].results)
    line = next(each for each in document["results"] if each["contender"] == "own collective")
    assert line["tokens"] == 24 and line["experts"] == 8
    assert line["link_share"] == pytest.approx(line["gb_per_s"] / document["link"]["gb_per_s"])
    assert line["gb_per_s"] == pytest.approx(line["wire_bytes"] / line["microseconds"] / 1e3)
    assert {each["contender"] for each in document["not_run"]} >= {"DeepEP", "own symmetric"}


def test_plot_is_a_picture(reports: list[Report], tmp_path: Path) -> None:
    plot_report(tmp_path / "bench.png", reports[0])
    content = (tmp_path / "bench.png").read_bytes()
    assert content.startswith(b"\x89PNG") and len(content) > 20_000


def test_a_contender_that_fails_on_one_rank_takes_nobody_along() -> None:
    for report in run_ranks(run_tiny, 2, True, timeout=150):
        reasons = {each.contender: each.reason for each in report.not_run}
        assert reasons["unable"] == "ValueError: needs what is not here"
        assert reasons["failing"] == "not run any more: rank 1: ValueError: planted"
        (failed,) = (line for line in report.results if line.contender == "failing")
        assert failed.problem == "rank 1: ValueError: planted" and failed.microseconds is None
        others = {line.contender for line in report.results if line.ranked}
        assert others == {"own collective", "torch all-to-all"}
        assert "failed" in printed(report)


def test_an_attempt_of_one_rank() -> None:
    referee = Referee(0, 1, None, 1.0)
    good = referee.attempt(lambda: 3, facts=lambda value: value + 1)
    assert (good.value, good.facts, good.problem) == (3, [4], None)
    bad = referee.attempt(lambda: 1 // 0)
    assert bad.value is None and bad.everywhere and bad.problem.startswith("ZeroDivisionError: ")


def printed(report: Report) -> str:
    console = Console(file=io.StringIO(), width=80, highlight=False)
    print_begin(console, report)
    for shape in dict.fromkeys(line.shape for line in report.results):
        print_shape(console, report, shape)
    print_end(console, report)
    return console.file.getvalue()


def test_the_program_starts_its_ranks_and_writes_json() -> None:
    done = run_program(
        "bench", "--ranks", 2, "--tokens", "16,8", "--hidden", 64, "--experts", 4, "--top-k", 2, "--iterations", 2,
        "--routing", "skewed", "--directions", "dispatch,combine", "--mode", "static", "--contenders", "own,torch",
        "--json", "-",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert {each["tokens"] for each in document["results"]} == {8, 16}
    assert {each["contender"] for each in document["results"]} == {"own collective", "torch all-to-all"}
    assert "contender" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--tokens many", "--tokens must be whole numbers separated by commas, got 'many'"),
        ("--tokens 0", "--tokens must be at least 1, got 0"),
        ("--hidden 48 --experts 8", "--hidden must be a multiple of 32 where MXFP8 is used, got 48"),
        ("--experts 9 --ranks 2", "--experts must be a multiple of the 2 ranks, got 9"),
        ("--top-k 17", "--top-k must not be above --experts 16, got 17"),
        ("--dtype fp4", "--dtype must be of bf16, mxfp8, mxfp8-kept, got 'fp4'"),
        ("--mode fast", "--mode must be of eager, static, graph, got 'fast'"),
        ("--directions up", "--directions must be of dispatch,"),
        ("--transport pigeon", "--transport must be one of all, auto,"),
        ("--preset slow", "--preset must be one of quick, anchors, full, got 'slow'"),
        ("--ranks 0", "--ranks must be at least 1, got 0"),
        ("--iterations 0", "--iterations must be at least 1, got 0"),
        ("--skew nan", "--skew must be finite and above 0, got nan"),
        ("--plot /nowhere/at/all.png", "the folder /nowhere/at does not exist"),
    ],
)
def test_bad_option_is_one_line_and_status_2(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "--device", "cpu", *arguments.split()]) == 2
    output = capsys.readouterr()
    assert message in output.err and len(output.err.strip().splitlines()) == 1 and output.out == ""
