"""The result as a person reads it: progress while it runs, tables, findings with remedies, a verdict."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..tables import print_table
from .correctness import DIRECTIONS
from .findings import Finding, ranges
from .result import CheckResult

__all__ = ["Progress", "print_json", "print_report"]

_STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}


class Progress:
    """One line for each finished stage, and on a terminal a line that says what is going on.

    Args:
        console: where to write; None on ranks that stay silent.
    """

    def __init__(self, console: Console | None) -> None:
        self._console = console
        self._status: Any = None

    @contextmanager
    def stage(self, name: str) -> Iterator[list[str]]:
        """While a stage runs. What is appended to the list stands beside its name at the end."""
        notes: list[str] = []
        if self._console is None:
            yield notes
            return
        started = time.perf_counter()
        if self._console.is_terminal:
            self._status = self._console.status(f"{name} ...")
            self._status.start()
        try:
            yield notes
        except BaseException:
            notes[:] = ["[bold red]failed[/]"]
            raise
        finally:
            self.stop()
            said = Text.from_markup(", ".join(notes) or "done")
            said.pad_right(max(0, 40 - said.cell_len))
            seconds = time.perf_counter() - started
            self._console.print(Text.assemble(f"  {name:<26} ", said, f" {seconds:5.1f} s"), soft_wrap=True)

    def stop(self) -> None:
        """Take the moving line away."""
        if self._status is not None:
            self._status.stop()
            self._status = None


def print_json(console: Console, result: dict[str, Any]) -> None:
    """The whole result on standard output."""
    console.file.write(json.dumps(result, indent=1) + "\n")
    console.file.flush()


def print_report(console: Console, result: CheckResult) -> None:
    """Tables for what was reached, findings, verdict; fits 80 columns."""
    for table, note in (
        (_hosts(result), _environment_note(result)),
        (_transports(result), ""),
        (_correctness(result), ""),
        (_links(result), ""),
        (_speeds(result), _speed_note(result)),
    ):
        if table is not None:
            console.print()
            print_table(console, table)
            if note:
                console.print(note, style="dim")
    print_findings(console, result.findings)
    _print_verdict(console, result)


def print_findings(console: Console, findings: Sequence[Finding]) -> None:
    """Errors first; the remedy of a kind once, under the last finding of that kind."""
    order = ("error", "warning", "note")
    ranked = sorted(findings, key=lambda each: (order.index(each.severity), each.kind))
    if ranked:
        console.print("\n[bold]Findings[/bold]")
    for number, finding in enumerate(ranked):
        style = _STYLES[finding.severity]
        console.print(
            Padding(f"[{style}]{finding.severity}[/] [dim]{finding.kind}[/]  {escape(finding.message)}", (0, 0, 0, 2))
        )
        following = ranked[number + 1] if number + 1 < len(ranked) else None
        if following is None or (following.kind, following.remedy) != (finding.kind, finding.remedy):
            console.print(Padding(f"-> {escape(finding.remedy)}", (0, 0, 0, 6)))


def _print_verdict(console: Console, result: CheckResult) -> None:
    counts = {name: sum(each.severity == name for each in result.findings) for name in ("error", "warning")}
    said = ", ".join(f"{count} {name}{'s' if count > 1 else ''}" for name, count in counts.items() if count)
    console.print()
    if result.failed:
        what = said or "1 error"
        why = "" if result.complete else "; the check broke off"
        console.print(f"[bold red]FAILED[/]: {what}{why}. {result.seconds:.0f} s")
        return
    works = f"expert parallelism works on {_count(result.ranks, 'rank')}"
    console.print(
        f"[bold green]OK[/]: {works} of {_count(len(set(result.hosts)), 'host')}{f'; {said}' if said else ''}. "
        f"{result.seconds:.0f} s"
    )


# ---- tables ---------------------------------------------------------------------------------------------


def _hosts(result: CheckResult) -> Table | None:
    if not result.facts:
        return None
    table = Table(title="Hosts", title_justify="left")
    for heading, options in (
        ("host", {"no_wrap": True}),
        ("ranks", {}),
        ("cores", {"justify": "right"}),
        ("threads a rank", {"justify": "right"}),
        ("GPUs", {}),
        ("links between GPUs", {}),
    ):
        table.add_column(heading, **options)
    hosts = result.hosts
    for host in dict.fromkeys(hosts):
        here = [fact for fact, name in zip(result.facts, hosts, strict=True) if name == host]
        table.add_row(
            host,
            ranges(fact["rank"] for fact in here),
            str(here[0]["cores"]),
            str(here[0]["threads"]),
            _gpu_summary(here),
            _link_summary(here),
        )
    return table


def _environment_note(result: CheckResult) -> str:
    """Versions of rank 0 (findings say what differs) and the variables that are set anywhere."""
    if not result.facts:
        return ""
    names = {"nccl": "NCCL ", "cuda": "CUDA ", "cupy": "CuPy ", "mpi": ""}
    versions = [
        f"{names.get(name, f'{name} ')}{value}"
        for name, value in result.facts[0]["versions"].items()
        if value and name != "machine"
    ]
    variables = _variables(result.facts)
    return escape(", ".join(versions) + ("\n" + ", ".join(variables) if variables else ""))


def _variables(facts: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for name in sorted({name for fact in facts for name in fact["variables"]}):
        values = list(dict.fromkeys(fact["variables"].get(name, "(unset)") for fact in facts))
        shown = "|".join(values[:4]) + ("|..." if len(values) > 4 else "")
        lines.append(f"{name}={shown}")
    return lines


def _gpu_summary(here: Sequence[dict[str, Any]]) -> str:
    cards = {gpu["uuid"]: f"{gpu['name']}, {gpu['memory_gb']} GB" for fact in here for gpu in fact["gpus"]}
    kinds = list(cards.values())
    return "; ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)) or "none"


def _link_summary(here: Sequence[dict[str, Any]]) -> str:
    links = [link for fact in here for link in fact["links"]]
    if not links:
        return "-"
    reachable = sum(link["peer_access"] for link in links)
    access = "all reach each other" if reachable == len(links) else f"{reachable} of {len(links)} reach each other"
    lanes = sorted({link["nvlinks"] for link in links if link["nvlinks"] is not None})
    return access + (f"; {lanes[0]} NVLinks each" if lanes else "")


def _transports(result: CheckResult) -> Table | None:
    if not result.transports or result.ranks == 1:
        return None
    table = Table(title="Transports", title_justify="left")
    table.add_column("transport", no_wrap=True)
    table.add_column("usable here")
    for name, problem in result.transports.items():
        chosen = " (what transport='auto' takes)" if name == result.auto else ""
        table.add_row(name, Text(f"no: {problem}") if problem else Text(f"yes{chosen}", style="green"))
    return table


def _correctness(result: CheckResult) -> Table | None:
    grid = result.grid()
    if not grid:
        return None
    table = Table(title="Correctness, bit for bit against a reference", title_justify="left", collapse_padding=True)
    for heading in ("transport", "mode, wire"):
        table.add_column(heading, no_wrap=True)
    for direction in DIRECTIONS:
        table.add_column(direction.replace(" ", "\n"), justify="center")
    table.add_column("overflow,\nreplay", justify="center")
    replay = {each["transport"]: each for each in result.replays}
    before = None
    for line in grid:
        new = line["transport"] != before
        if new and before is not None:
            table.add_section()
        before = line["transport"]
        cells = [_cell(line["wrong"][direction], line["cases"]) for direction in DIRECTIONS]
        again = replay.get(line["transport"])
        shows = again is not None and line["mode"] == "static" and line["wire"] == "mxfp8"
        name = line["transport"] if new else ""
        table.add_row(name, f"{line['mode']} {line['wire']}", *cells, _replay(again, shows))
    return table


def _cell(wrong: int, cases: int) -> Text:
    return Text("ok", style="green") if not wrong else Text(f"WRONG {wrong}/{cases}", style="bold red")


def _replay(again: dict[str, Any] | None, shows: bool) -> Text:
    if not shows:
        return Text("")
    return Text("WRONG", style="bold red") if again["wrong"] else Text(f"ok ({again['replays']})", style="green")


def _links(result: CheckResult) -> Table | None:
    if not result.classes:
        return None
    backend = result.facts[0]["backend"]
    table = Table(title="Between two ranks, both directions at once", title_justify="left")
    table.add_column("path", no_wrap=True)
    table.add_column("pairs", no_wrap=True)
    for heading in ("latency us", "GB/s each way", "slowest pair"):
        table.add_column(heading, justify="right", no_wrap=True)
    for link in result.classes:
        a, b = link.slowest
        table.add_row(
            f"{backend} {link.path}" if link.path == "messages" else link.path,
            f"{link.pairs} {link.name}",
            f"{link.latency_us:.1f}",
            f"{link.gb_per_s:.3g}",
            f"{link.slowest_gb_per_s:.3g} ({a}-{b})",
        )
    return table


def _speeds(result: CheckResult) -> Table | None:
    if not result.speeds or result.shape is None:
        return None
    table = Table(title="Dispatch and combine, static mode", title_justify="left")
    table.add_column("transport", no_wrap=True)
    table.add_column("wire", no_wrap=True)
    for heading in ("dispatch us", "GB/s", "combine us", "GB/s"):
        table.add_column(heading, justify="right")
    for speed in result.speeds:
        table.add_row(
            speed.transport,
            speed.wire,
            f"{speed.dispatch_us:,.0f}",
            f"{speed.dispatch_gb_per_s:.3g}" if result.ranks > 1 else "-",
            f"{speed.combine_us:,.0f}",
            f"{speed.combine_gb_per_s:.3g}" if result.ranks > 1 else "-",
        )
    return table


def _speed_note(result: CheckResult) -> str:
    shape = result.shape
    if shape is None:
        return ""
    graphs = ", each a CUDA graph" if result.captured else ""
    return (
        f"{shape.tokens} bf16 tokens a rank, H = {shape.hidden_size}, {shape.num_experts} experts, top {shape.top_k}, "
        f"uniform routing{graphs}. Median of the slowest rank; GB/s: token rows for other ranks, once for each "
        f"(token, rank)."
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
