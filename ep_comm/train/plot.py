"""A picture of a run: the loss above, every layer's budget and what it needed below."""

from __future__ import annotations

from pathlib import Path

from ..errors import EPError
from ..extras import install_hint
from .loop import History

__all__ = ["PlotError", "plot_run"]

_BLUE, _RED, _GREY = "#2b6cb0", "#c53030", "#718096"


class PlotError(EPError):
    """The picture cannot be drawn."""


def plot_run(path: Path, history: History, validation_loss: float | None, title: str) -> None:
    """Draw the run into ``path``; its ending decides the format (.png, .svg, .pdf).

    Raises:
        PlotError: matplotlib is missing, or the file cannot be written.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise PlotError(f"--plot needs matplotlib: {install_hint('plot')}") from error
    layers = len(history.required[0]) if history.required else 0
    figure, axes = plt.subplots(
        1 + layers,
        1,
        sharex=True,
        figsize=(9, 3.4 + 1.25 * layers),
        gridspec_kw={"height_ratios": [2.6] + [1.0] * layers},
        layout="constrained",
        squeeze=False,
    )
    _draw_loss(axes[0][0], history, validation_loss)
    for layer in range(layers):
        _draw_layer(axes[1 + layer][0], history, layer)
    axes[-1][0].set_xlabel("step")
    axes[-1][0].xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.suptitle(title, fontsize=11, x=0.02, ha="left")
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise PlotError(f"--plot {path} cannot be written: {error}") from error
    finally:
        plt.close(figure)


def _draw_loss(axis, history: History, validation_loss: float | None) -> None:
    steps = range(len(history.losses))
    axis.plot(steps, history.losses, color=_BLUE, linewidth=1.4, label="training loss")
    replayed = [step for step in history.replayed if step < len(history.losses)]
    if replayed:
        axis.scatter(
            replayed,
            [history.losses[step] for step in replayed],
            color=_RED,
            s=22,
            zorder=3,
            label=f"overflow, discarded and replayed ({len(replayed)})",
        )
    if validation_loss is not None:
        axis.axhline(
            validation_loss,
            color=_GREY,
            linestyle="--",
            linewidth=1,
            label=f"validation {validation_loss:.3f}",
        )
    axis.set_ylabel("nats / byte")
    axis.legend(frameon=False, fontsize=8, loc="upper right")
    _clean(axis)


def _draw_layer(axis, history: History, layer: int) -> None:
    first = len(history.budgets) - len(history.required)
    steps = range(first, len(history.budgets))
    budget = [rows[layer] for rows in history.budgets[first:]]
    required = [rows[layer] for rows in history.required]
    axis.step(steps, budget, where="mid", color=_GREY, linewidth=1.2, label="budget")
    axis.plot(steps, required, color=_BLUE, linewidth=1.0, label="required rows")
    over = [step for step, rows, limit in zip(steps, required, budget, strict=True) if rows > limit]
    axis.scatter(over, [required[step - first] for step in over], color=_RED, s=16, zorder=3, label="overflow")
    axis.set_ylabel(f"layer {layer}\nrows", fontsize=8)
    axis.tick_params(labelsize=7)
    low, high = min(required), max(max(budget), max(required))
    axis.set_ylim(low - 0.08 * (high - low + 1), high + 0.15 * (high - low + 1))
    if layer == 0:
        axis.legend(frameon=False, fontsize=7, loc="lower right", bbox_to_anchor=(1.0, 0.97), ncol=3)
    _clean(axis)


def _clean(axis) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color="#e2e8f0", linewidth=0.6)
