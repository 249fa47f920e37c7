"""A picture of the results: one panel a shape, one group of bars a direction, the link's limit as a line."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from ..errors import EPError
from ..tune.optional import pyplot
from .options import DIRECTIONS, Shape
from .report import Report, Result

__all__ = ["PlotError", "plot_report"]

_COLOURS = {
    "own symmetric": "#2b6cb0",
    "own collective": "#2f855a",
    "own hierarchical": "#00838f",
    "own auto": "#553c9a",
}
_OTHERS = ("#718096", "#a0aec0", "#4a5568", "#cbd5e0")
_HATCHES = {"bf16": "", "mxfp8": "///", "mxfp8-kept": "xx"}
_SHADES = {"graph": 1.0, "static": 0.75, "eager": 0.5}
_LIMIT = "#c53030"


class PlotError(EPError):
    """The picture cannot be drawn."""


def plot_report(path: Path, report: Report) -> None:
    """Draw the results that are right into ``path``; its ending decides the format (.png, .svg, .pdf).

    Raises:
        ConfigError: matplotlib is missing.
        PlotError: the file cannot be written, or there is nothing to draw.
    """
    shapes = list(dict.fromkeys(each.shape for each in report.results if each.ranked))
    if not shapes:
        raise PlotError(f"--plot {path}: there are no results to draw")
    plt = pyplot()
    columns = 1 if len(shapes) == 1 else 2
    lines = math.ceil(len(shapes) / columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(9 * columns, 1.4 + 3.4 * lines), layout="constrained", squeeze=False
    )
    colours = _colours(report)
    for axis, shape in zip(axes.flat, shapes, strict=False):
        _draw_shape(axis, report, shape, colours)
    for axis in list(axes.flat)[len(shapes) :]:
        axis.axis("off")
    facts = report.facts
    title = f"ep-comm bench: {facts['ranks']} x {facts['device']}, {facts['backend']}"
    if report.link is not None:
        title += f", link {report.link.gb_per_s:.1f} GB/s"
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    handles = dict(_legend(axes))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise PlotError(f"--plot {path} cannot be written: {error}") from error
    finally:
        plt.close(figure)


def _colours(report: Report) -> dict[str, str]:
    names = list(dict.fromkeys(each.contender for each in report.results))
    others = [name for name in names if name not in _COLOURS]
    return {**_COLOURS, **{name: _OTHERS[number % len(_OTHERS)] for number, name in enumerate(others)}}


def _draw_shape(axis: Any, report: Report, shape: Shape, colours: dict[str, str]) -> None:
    place, ticks = 0.0, []
    for direction in DIRECTIONS:
        lines = [each for each in report.of(shape, direction) if each.ranked]
        if not lines:
            continue
        first = place
        for line in lines:
            _draw_bar(axis, report, line, place, colours[line.contender])
            place += 1.0
        ticks.append(((first + place - 1) / 2, direction.replace("_", "\n")))
        place += 1.0
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.yaxis.set_minor_formatter("")
    low, high = axis.get_ylim()
    axis.set_ylim(low, high * 1.6)  # room for the figures above the bars
    axis.set_xticks([where for where, _ in ticks], [text for _, text in ticks], fontsize=9)
    axis.set_ylabel("us, log scale")
    axis.set_title(str(shape), fontsize=10, loc="left")
    axis.grid(axis="y", alpha=0.25)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _draw_bar(axis: Any, report: Report, line: Result, place: float, colour: str) -> None:
    sums = line.direction in ("combine", "dispatch_backward")
    rows = "bf16" if sums else line.dtype
    sms = f", {line.sms} SMs" if line.sms.isdigit() else ""
    few = line.sms.isdigit() and int(line.sms) < report.facts.get("multiprocessors", 0)
    axis.bar(
        place,
        line.microseconds,
        width=0.86,
        color=colour,
        alpha=_SHADES[line.mode] * (0.55 if few else 1.0),
        hatch=_HATCHES[rows],
        edgecolor="white",
        label=f"{line.contender}, {rows}, {line.mode}{sms}",
    )
    axis.annotate(
        f"{line.microseconds:,.0f}",
        (place, line.microseconds),
        xytext=(0, 2),
        textcoords="offset points",
        ha="center",
        fontsize=6.5,
    )
    if report.link is not None and line.wire_bytes:
        limit = line.wire_bytes / report.link.gb_per_s / 1e3
        axis.plot([place - 0.43, place + 0.43], [limit, limit], color=_LIMIT, lw=1.4, label="link limit of its bytes")


def _legend(axes: Any) -> list[tuple[str, Any]]:
    found: dict[str, Any] = {}
    for axis in axes.flat:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return sorted(found.items(), key=lambda item: item[0].startswith("link"))
