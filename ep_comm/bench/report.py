"""Results, as a table and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..distributed import Env
from ..tables import print_table
from .options import DIRECTIONS, BenchOptions, Shape

__all__ = ["COLUMNS", "LinkSpeed", "NotRun", "Report", "Result", "print_begin", "print_end", "print_shape", "to_json"]

COLUMNS = (
    ("contender", 16), ("rows", 10), ("mode", 6), ("SMs", 4), ("us", 8), ("MB", 6), ("GB/s", 5), ("link", 4),
    ("syncs", 5), ("check", 7),
)  # fmt: skip
"""Heading and width; see docs/bench.md for what they mean."""
_LEFT = ("contender", "rows", "mode", "check")


@dataclass
class Result:
    """One line of the table.

    Attributes:
        shape, direction, contender, dtype, mode, sms: what was measured.
        microseconds: median over iterations of the slowest rank; None where it failed.
        fastest, slowest: of these iterations.
        wire_bytes: that the busiest rank sends or receives.
        host_syncs: in one operation; None where nothing counts them.
        check: how results were compared: ``"bitwise"`` or ``"rounded"``.
        wrong: what differs from plain torch, on which rank; None where nothing does.
        problem: why it was not measured, or None.
    """

    shape: Shape
    direction: str
    contender: str
    dtype: str
    mode: str
    sms: str
    microseconds: float | None = None
    fastest: float | None = None
    slowest: float | None = None
    wire_bytes: int = 0
    host_syncs: int | None = None
    check: str | None = None
    wrong: str | None = None
    problem: str | None = None

    @property
    def ranked(self) -> bool:
        """It was measured and its results are right."""
        return self.microseconds is not None and self.wrong is None

    @property
    def gb_per_s(self) -> float | None:
        """Wire bytes of the busiest rank over the time, 1e9 bytes a second."""
        return self.wire_bytes / self.microseconds / 1e3 if self.microseconds and self.wire_bytes else None


@dataclass(frozen=True)
class LinkSpeed:
    """A plain copy between neighbours: how it was made, and its speed in 1e9 bytes a second and direction."""

    how: str
    gb_per_s: float


@dataclass(frozen=True)
class NotRun:
    """A contender that did not run, or stopped, and why."""

    contender: str
    reason: str


@dataclass
class Report:
    """Everything a benchmark found."""

    facts: dict[str, Any]
    options: dict[str, Any]
    link: LinkSpeed | None = None
    contenders: dict[str, str] = field(default_factory=dict)
    imbalance: dict[str, float] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)
    not_run: list[NotRun] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def begin(cls, options: BenchOptions, env: Env) -> Report:
        """An empty report of ``options`` on ``env``."""
        facts: dict[str, Any] = {
            "ranks": env.world_size,
            "backend": env.backend,
            "device": env.device.type,
            "torch": torch.__version__,
        }
        if env.device.type == "cuda":
            properties = torch.cuda.get_device_properties(env.device)
            facts |= {"device": properties.name, "multiprocessors": properties.multi_processor_count}
            facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        plain = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
        return cls(facts, plain)

    def add(self, result: Result) -> None:
        """Append a line."""
        self.results.append(result)

    def of(self, shape: Shape, direction: str) -> list[Result]:
        """The lines of one comparison: right ones by time, then wrong and failed ones."""
        lines = [each for each in self.results if each.shape == shape and each.direction == direction]
        return sorted(lines, key=lambda each: (not each.ranked, each.microseconds or 0.0))

    def link_share(self, result: Result) -> float | None:
        """Part of the link's copy speed that a result reaches."""
        speed = result.gb_per_s
        return speed / self.link.gb_per_s if speed is not None and self.link is not None else None

    @property
    def wrong(self) -> list[Result]:
        """Results that differ from plain torch."""
        return [each for each in self.results if each.wrong]


def print_begin(console: Console, report: Report) -> None:
    """What is measured, and the headings."""
    facts, options = report.facts, report.options
    where = f"{facts['ranks']} x {facts['device']}, {facts['backend']}, torch {facts['torch']}"
    console.print(f"[bold]ep-comm bench[/bold]: {where}")
    if report.link is not None:
        console.print(f"link: {report.link.gb_per_s:.1f} GB/s each way ({report.link.how})")
    for note in report.notes:
        console.print(note, style="yellow", markup=False)
    console.print(f"us: median of {options['iterations']} iterations of the slowest rank, everything included")
    table = _table()
    table.show_header = True
    print_table(console, table)


def print_shape(console: Console, report: Report, shape: Shape) -> None:
    """The lines of one shape, direction by direction, the fastest first."""
    busiest = report.imbalance.get(str(shape))
    for direction in DIRECTIONS:
        lines = report.of(shape, direction)
        if not lines:
            continue
        load = f", load {busiest:.2f}" if busiest else ""
        console.print(f"[bold]{direction.replace('_', ' ')}[/bold]  {shape}{load}", soft_wrap=True)
        table = _table()
        for line in lines:
            table.add_row(*_cells(report, line), style=None if line.ranked else "red")
        print_table(console, table)
        for line in lines:
            why = line.wrong or line.problem
            if why:
                console.print(f"  {line.contender} {line.dtype} {line.mode}: {why}", style="red", markup=False)


def print_end(console: Console, report: Report) -> None:
    """Who did not run, and what the names mean."""
    for name, origin in report.contenders.items():
        console.print(f"{name}: {origin}", style="dim", markup=False, soft_wrap=True)
    for each in report.not_run:
        console.print(f"{each.contender}: {each.reason}", style="dim", markup=False, soft_wrap=True)


def to_json(report: Report) -> str:
    """The report for programs: facts, options, link, ``results`` and ``not_run``."""
    results = []
    for each in report.results:
        line = asdict(each)
        results.append({**line.pop("shape"), **line, "gb_per_s": each.gb_per_s, "link_share": report.link_share(each)})
    document = {
        **report.facts,
        "options": report.options,
        "link": None if report.link is None else asdict(report.link),
        "contenders": report.contenders,
        "imbalance": report.imbalance,
        "results": results,
        "not_run": [asdict(each) for each in report.not_run],
        "notes": report.notes,
    }
    return json.dumps(document, indent=1) + "\n"


def _table() -> Table:
    table = Table(show_header=False, box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for name, width in COLUMNS:
        table.add_column(name, width=width, no_wrap=True, justify="left" if name in _LEFT else "right")
    return table


def _cells(report: Report, line: Result) -> list[str | Text]:
    wire = "bf16" if line.direction in ("combine", "dispatch_backward") else line.dtype
    speed, share = line.gb_per_s, report.link_share(line)
    check = "failed" if line.problem else "WRONG" if line.wrong else line.check or "-"
    return [
        line.contender,
        wire,
        line.mode,
        line.sms,
        "-" if line.microseconds is None else _microseconds(line.microseconds),
        _tenths(line.wire_bytes / 1e6) if line.wire_bytes else "-",
        "-" if speed is None else _tenths(speed),
        "-" if share is None else f"{100 * share:.0f}%" if share < 9.995 else f"{share:.0f}x",
        "-" if line.host_syncs is None else str(line.host_syncs),
        check,
    ]


def _tenths(value: float) -> str:
    """In the width of its column whatever it is."""
    return f"{value:.1f}" if value < 999.95 else f"{value:,.0f}" if value < 99_999.5 else f"{value:.0e}"


def _microseconds(value: float) -> str:
    if value >= 999_999.5:
        return f"{value / 1e6:,.2f} s"
    return f"{value:,.1f}" if value < 9_999.95 else f"{value:,.0f}"
