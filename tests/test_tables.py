"""Tables of the program at any width: every number whole, and within the width where the words fit it."""

from __future__ import annotations

import io
import re

import pytest
from rich import box
from rich.console import Console
from rich.table import Table

from ep_comm.bench.options import Shape
from ep_comm.bench.report import COLUMNS, LinkSpeed, Report, Result, print_begin, print_shape
from ep_comm.tables import print_table


def printed(table: Table, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    print_table(console, table)
    return console.file.getvalue()


def numbers_table(**options: object) -> Table:
    table = Table(title="load of everything", **options)
    table.add_column("layer", no_wrap=True)
    table.add_column("why")
    for heading in ("mean rows", "99\u00a0%", "overflows in 1,000 steps", "two\nlines"):
        table.add_column(heading, justify="right")
    for layer in range(2):
        table.add_row(f"layer.{layer}", "a longer text of words", "1,234", "12.5", "0.00285 [<0.001 to 0.039]", "7")
    return table


@pytest.mark.parametrize("options", [{}, {"collapse_padding": True}, {"box": None}, {"box": box.SIMPLE_HEAD}])
@pytest.mark.parametrize("width", [20, 50, 62, 80, 120])
def test_nothing_is_cut(options: dict[str, object], width: int) -> None:
    text = printed(numbers_table(**options), width)
    assert "…" not in text and max(map(len, text.splitlines())) <= max(width, 60)
    for word in (
        "layer.0",
        "layer.1",
        "longer",
        "1,234",
        "12.5",
        "0.00285",
        "[<0.001",
        "0.039]",
        "overflows",
        "99\u00a0%",
    ):
        assert word in text
    if width >= 80:
        assert text.count("0.00285 [<0.001 to 0.039]") == 2  # numbers break last
    if width >= 120:
        assert "overflows in 1,000 steps" in text and "a longer text of words" in text


def test_an_empty_table() -> None:
    assert "nothing" in printed(Table("nothing"), 80)
    assert printed(Table(), 80).strip() == ""


@pytest.mark.parametrize("width", [40, 80])
def test_bench_lines_of_any_size(width: int) -> None:
    """Very fast and very slow, little and much, a link far exceeded: each in its column."""
    shape = Shape(8192, 7168, 256, 8, "uniform")
    report = Report({"ranks": 2, "device": "cpu", "backend": "gloo", "torch": "2"}, {"iterations": 3})
    report.link = LinkSpeed("copy", 0.5)
    for microseconds, wire in ((0.5, 999_960), (9_999.96, 999_970_000), (999_999.6, 12_345_678_000), (3e8, 10**14)):
        name = f"own {microseconds}"
        report.add(Result(shape, "dispatch", name, "mxfp8-kept", "static", "132", microseconds, wire_bytes=wire))
    console = Console(file=io.StringIO(), width=width, highlight=False)
    print_begin(console, report)
    print_shape(console, report, shape)
    lines = console.file.getvalue().splitlines()
    rows = [re.split(" +", line.strip()) for line in lines if line.startswith("own")]
    assert "…" not in console.file.getvalue() and max(map(len, lines)) <= 80
    assert [row[5] for row in rows] == ["0.5", "10,000", "1.00", "300.00"]
    assert [row[-5] for row in rows] == ["1.0", "1,000", "12,346", "1e+08"]
    assert all(len(row) == len(COLUMNS) + 1 + (row[6] == "s") for row in rows)
