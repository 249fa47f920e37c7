"""The report's pictures: load, demand over time, memory against replays, tail."""

from __future__ import annotations

import base64
import io
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from .optional import pyplot
from .recommend import FrontierPoint
from .run import TuneResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["PLOTS", "figure_png", "plot_demand", "plot_frontier", "plot_load", "plot_tail"]

_MAX_PANELS = 12
_MAX_POINTS = 3000
_BLUE, _ORANGE, _RED, _GREY = "#1f6feb", "#e3730b", "#c62828", "#8a8f98"


def figure_png(figure: Figure) -> str:
    """The figure as a data URI; the figure is closed."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, bbox_inches="tight")
    pyplot().close(figure)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def plot_load(result: TuneResult) -> Figure:
    """Load of every expert, and of every rank, as a multiple of the mean, layer by layer."""
    sample = result.sample
    height = 1.6 + 0.22 * len(sample.layers)
    figure, axes = pyplot().subplots(1, 2, figsize=(11, min(height, 9)), gridspec_kw={"width_ratios": [3, 1]})
    for axis, load, what in ((axes[0], sample.load_LE, "expert"), (axes[1], sample.load_LP, "rank")):
        relative = load / np.maximum(load.mean(1, keepdims=True), 1e-9)
        top = max(1.05, float(relative.max()))
        image = axis.imshow(
            relative, aspect="auto", cmap="RdBu_r", vmin=2 - top if top < 2 else 0, vmax=top, interpolation="nearest"
        )
        axis.set_xlabel(what)
        axis.set_title(f"load of each {what}, x mean", fontsize=10)
        _name_layers(axis, sample.layers)
        axis.xaxis.get_major_locator().set_params(integer=True)
        figure.colorbar(image, ax=axis, fraction=0.05, pad=0.02)
    axes[0].set_ylabel("MoE layer")
    figure.tight_layout()
    return figure


def _name_layers(axis: Any, layers: list[str]) -> None:
    every = max(1, len(layers) // 20)
    axis.set_yticks(range(0, len(layers), every), layers[::every])


def plot_demand(result: TuneResult) -> Figure:
    """Rows that the busiest rank needed in each step, and the budget; the layers with the least room first."""
    sample, budgets = result.sample, result.recommendation.chosen.budgets_J
    layers = len(sample.layers)
    room = budgets[:layers] / np.maximum(sample.rows_SL.max(0), 1)
    shown = np.sort(np.argsort(room, kind="stable")[:_MAX_PANELS])
    columns = min(3, len(shown))
    lines = math.ceil(len(shown) / columns)
    figure, axes = pyplot().subplots(lines, columns, figsize=(11, 1.0 + 2.1 * lines), sharex=True, squeeze=False)
    every = max(1, sample.num_steps // _MAX_POINTS)
    left_out = sample.num_steps - result.model.num_steps
    time = np.arange(sample.num_steps)
    for axis, layer in zip(axes.flat, shown, strict=False):
        axis.plot(time[::every], sample.rows_SL[::every, layer], ".", ms=2, color=_BLUE, label="required rows")
        axis.axhline(budgets[layer], color=_RED, lw=1.4, label="budget")
        axis.axhline(sample.mean_load, color=_GREY, lw=1, ls="--", label="mean load")
        if result.model.drift.first and left_out > 0:
            axis.axvspan(0, left_out, color=_GREY, alpha=0.15, label="left out of the fit")
        axis.set_title(f"layer {sample.layers[layer]}", fontsize=9)
        axis.tick_params(labelsize=8)
    for axis in list(axes.flat)[len(shown) :]:
        axis.axis("off")
    for axis in axes[-1]:
        axis.set_xlabel("step of the sample", fontsize=9)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=4, fontsize=9, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.35 / figure.get_figheight()))
    return figure


def plot_frontier(result: TuneResult) -> Figure:
    """Memory against replays in a thousand steps, with the choice and its interval, and the alternatives."""
    choice = result.recommendation
    figure, axis = pyplot().subplots(figsize=(8, 4.2))
    floor = 1e-3

    unit, name = (2**30, "GiB") if choice.chosen.memory_bytes >= 2**29 else (2**20, "MiB")

    def place(point: FrontierPoint) -> tuple[float, float]:
        return point.memory_bytes / unit, max(1000 * point.probability, floor)

    curve = np.array([place(point) for point in choice.frontier])
    axis.plot(curve[:, 0], curve[:, 1], ".-", color=_BLUE, ms=4, lw=1, label="cost-optimal per-layer budgets")
    interval = choice.risk.probability
    low, value, high = (max(1000 * each, floor) for each in (interval.low, interval.value, interval.high))
    memory = choice.chosen.memory_bytes / unit
    axis.errorbar(
        [memory],
        [value],
        yerr=[[value - low], [high - value]],
        fmt="o",
        color=_RED,
        capsize=4,
        label="recommended, 95 % interval",
        zorder=5,
    )
    for each, marker in zip(choice.alternatives, "s^D", strict=True):
        axis.plot(place(each.point)[0], max(1000 * each.probability, floor), marker, color=_ORANGE, label=each.name)
    limit = result.request.replays_per_1000
    if limit:
        axis.axhline(limit, color=_GREY, ls="--", lw=1, label="--replays-per-1000")
    if result.request.max_memory is not None:
        axis.axvline(result.request.max_memory / unit, color=_GREY, ls=":", lw=1, label="--max-memory")
    axis.set_yscale("log")
    axis.set_xlabel(f"memory of the buffers, {name} a rank")
    axis.set_ylabel("replays in 1,000 steps")
    axis.grid(alpha=0.25)
    axis.text(
        0.01, 0.02, f"values below {floor:g} are drawn at {floor:g}", transform=axis.transAxes, fontsize=7, color=_GREY
    )
    axis.legend(fontsize=8)
    figure.tight_layout()
    return figure


def plot_tail(result: TuneResult) -> Figure | None:
    """How often the tightest budget is used to which degree: sample, fit and interval. None without a tail."""
    model, risk = result.model, result.recommendation.risk
    if risk.tail is None:
        return None
    budgets = result.recommendation.chosen.budgets_J
    used = np.sort(model.utilisation(np.where(budgets < model.columns.limit_J, budgets, 1e12)))
    survival = 1 - (np.arange(1, used.size + 1) - 0.5) / used.size
    figure, axis = pyplot().subplots(figsize=(8, 4.2))
    axis.plot(used, survival, ".", color=_BLUE, ms=4, label="steps of the trace")
    grid = np.linspace(risk.tail.threshold, max(1.0, used[-1]) * 1.06, 160)
    axis.plot(grid, [risk.tail.exceedance(x)[0] for x in grid], color=_ORANGE, label="generalised Pareto fit")
    low, high = model.tail_band(budgets, grid)
    axis.fill_between(
        grid, np.maximum(low, 1e-12), high, color=_ORANGE, alpha=0.2, label="fit, 95 % bootstrap interval"
    )
    interval = risk.probability
    floor = 10.0 ** math.floor(math.log10(max(min(1 / used.size, interval.value or 1) / 10, 1e-7)))
    bottom = max(interval.low, floor)
    axis.errorbar(
        [1.0],
        [max(interval.value, floor)],
        yerr=[[max(interval.value, floor) - bottom], [max(interval.high, floor) - max(interval.value, floor)]],
        fmt="o",
        color=_RED,
        capsize=4,
        label="replay probability, corrected for the choice",
        zorder=5,
    )
    axis.axvline(1.0, color=_RED, lw=1, ls="--")
    axis.set_yscale("log")
    axis.set_ylim(floor, 1.2)
    axis.set_xlabel("utilisation of the tightest budget (above 1 the step is replayed)")
    axis.set_ylabel("share of steps above")
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8)
    figure.tight_layout()
    return figure


PLOTS = {
    "Load per expert and rank": plot_load,
    "Required rows over the steps, and the budgets": plot_demand,
    "Memory against replays": plot_frontier,
    "Tail of the utilisation": plot_tail,
}
"""Title and function of every picture, in the report's order."""
